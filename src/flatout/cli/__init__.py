"""The command line: each verb parses, calls `flatout.api` and renders what comes back.

app          the command, its verbs, and what happens when one of them cannot do its work
flags        every option that several verbs share: one name, one meaning, one help text
output       messages on stderr, JSON documents and tables on stdout

render/      reports and live lines for a terminal

diagnose  rules  tune  run  check  devices  plan  fetch  evolve  steer  adapt  watch  report     one verb each
"""
