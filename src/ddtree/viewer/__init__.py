"""Draft trees to look at: `scenes` says what is seen, `tree_text` and `tree_page` show it."""
