"""The command line: each verb parses, calls `flatout.api` and renders what comes back.

app          the command, its verbs, and what happens when one of them cannot do its work
flags        every option that several verbs share: one name, one meaning, one help text
output       messages on stderr, JSON documents and tables on stdout
progress     how far, how fast and about how long: a live line, or lines in a pipe

render/      reports for a terminal

diagnose  rules  tune  run  check  devices  plan  evolve  steer  adapt  watch  report     one verb each
"""
