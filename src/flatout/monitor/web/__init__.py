"""The monitor's page: live charts of one or several runs in a browser, and nothing fetched from elsewhere.

server        `serve`: starlette and uvicorn in a thread
access        who may read, by which headers
page_process  the page of a script that runs under watch, in a process beside it
feed          one broadcaster for all browsers
run_list      the runs it offers
connections   closes connections that hold a place and do nothing
run_stream    one run as events, encoded once for all browsers, the older the coarser
rule_page     the doctor's rules, for the links of a verdict
static/       the page itself, with uPlot
"""
