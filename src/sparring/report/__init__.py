"""What a run folder has to show, as a page: `sparring report` writes it to a file, `sparring watch` serves it live.

tail      new whole lines of a JSONL file          curves    any number of rows in at most 1024 buckets
timeline  who was at which stage when              media     videos and strips, failures first, within a budget
settings  what differs between runs                status    how a run stands
folder    all of the above of one run folder       collection  several of them, side by side
page      the HTML file                            server    the same, live
"""
