"""A run folder as a page: `sparring report` writes it to a file, `sparring watch` serves it live."""
