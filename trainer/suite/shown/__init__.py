"""The suite's tables and its page, with the papers' rows beside them."""
