"""Halts a process of a program under test just before a chosen file operation, so that it can be killed there.

With this folder on PYTHONPATH, MILES_TEST_PAUSE="EVENT COUNT GLOB" names an audit event of Python ("open",
"os.rename", "os.link", ...), and the path it is about to touch (of a rename or link: the new name). The process that
comes to the COUNTth such operation writes the file MILES_TEST_PAUSED and goes no further.
"""

import fnmatch
import os
import sys
import time

if "MILES_TEST_PAUSE" in os.environ:
    event_name, count, pattern = os.environ["MILES_TEST_PAUSE"].split(" ", 2)
    seen = 0

    def halt(event, arguments):
        if event != event_name:
            return
        global seen
        path = str(arguments[1] if event in ("os.rename", "os.link") else arguments[0])
        if fnmatch.fnmatch(path, pattern):
            seen += 1
            if seen == int(count):
                os.close(os.open(os.environ["MILES_TEST_PAUSED"], os.O_CREAT))
                time.sleep(3600)

    sys.addaudithook(halt)
