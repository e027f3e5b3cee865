"""Forms of requests and answers: ours, and those of other servers."""
