# Helpers for the scenarios of passt's own tests, in network namespaces.

note "$(pasta --version | head -n 1)"
# inside OPTION...: runs /clients/namespaces/inside in namespaces of pasta, and takes its results over.
inside() {
    pasta --no-map-gw --quiet --pid pasta.pid "$@" -- sh /clients/namespaces/inside >inside.log 2>&1 &
    wait_for 60 grep -q 'RESULT serves' inside.log
    sed -n 's/^RESULT \(ok\|not ok\) /\1 /p' inside.log >results
    while read -r line; do say_check "$line"; done <results
    is 'all checks inside were made' "$(wc -l <results)" "$INSIDE"
    cat inside.log
}
# Number of checks in there.
INSIDE=$(grep -c '^check ' /clients/namespaces/inside)
