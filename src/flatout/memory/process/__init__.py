"""Work in another process, so that no trace or probe changes or breaks this one.

isolated_process  a function in a child and its answer: forked where that works, else sent to a server
fork_server       a fresh process that forks a child for each request
parcel            a job as bytes
"""
