"""The report page of run folders: `sparring report` writes it to a file, `sparring watch` serves it live."""
