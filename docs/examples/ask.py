#!/usr/bin/env python3
"""Answers questions of guests: ask.py SOCKET [RULE...], then ringfence run --ask socket:SOCKET -- COMMAND

Approves the rules of the command line for the run of each guest, and denies all others.
"""
import json
import os
import socketserver
import sys


class Guest(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            question = json.loads(line)
            if "end" in question:  # Nobody has answered in time.
                continue
            answer = "run" if question["rule"] in sys.argv[2:] else "deny"
            # In one piece: each guest has a thread.
            print(f"{question['guest']} {question['rule']} {answer}\n", end="", flush=True)
            reply = {"question": question["question"], "answer": answer}
            self.wfile.write(json.dumps(reply).encode() + b"\n")


os.umask(0o077)
socketserver.ThreadingUnixStreamServer(sys.argv[1], Guest).serve_forever()
