"""The monitor's page: live charts of one or several runs in a browser, and nothing fetched from elsewhere.

server.py    `serve`: starlette and uvicorn in a thread;  access.py  who may read, and by which headers
beside.py    the page of a script that runs under watch, in a process beside it
feed.py      one broadcaster for all browsers;  stream.py  one run, encoded once for all of them
past.py      the samples of a run, the older the coarser;  follow.py  the log of a run somebody else keeps
events.py    what is sent: server-sent events;  catalogue.py  the runs there are
rule_page.py the doctor's rules, for the links of a verdict;  static/  the page itself, with uPlot
"""
