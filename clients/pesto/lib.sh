# Helpers for the scenarios of pesto, which changes the ports of a running pasta. $CLIENT is the one under test: `real-pesto` is
# passt's, `pesto` that of the program under test.

note "$($CLIENT --version | head -n 1), $(pasta --version | head -n 1)"
peer='python3 /clients/peer.py'
