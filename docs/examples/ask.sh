#!/bin/sh
# Answers one question of a guest: ringfence run --ask 'exec:./ask.sh RULES' -- COMMAND
# Approves the rules that are lines of the file RULES for this run, and denies all others.
if grep -qxF -e "$RINGFENCE_ASK_RULE" "$1"; then
    echo run
else
    echo deny
fi
