"""The likelihood service over HTTP: routes, the shape of answers, the start of the server."""
