"""A run folder as a page: `sparring report` writes it to a file, `sparring watch` serves it live.

tail    new whole lines of a JSONL file           curves      any number of rows in at most 1024 buckets; the timeline
media   videos and strips, failures first         run_folder  all that there is to show of one run; what runs differ in
page    several runs as one HTML file             server      the same, live
"""
