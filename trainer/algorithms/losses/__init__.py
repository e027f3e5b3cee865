"""Terms of the loss, each as a sum and a count."""
