# Checks of a scenario. Each is one line to the harness (vm/README.md). Scenarios of clients/ and dist/debian/try.sh write
# these lines to a file.

RESULTS=${RESULTS:-/dev/ttyS1}
# File with a line for each check, subshells included.
CHECKS=/tmp/checks
: >$CHECKS

# say LINE: writes a line to the harness and to the log.
say() {
    echo "$*" >>$RESULTS
    echo "$(uptime_now) $*"
}

# say_check LINE: counts a check, and writes its line.
say_check() {
    echo "$1" >>$CHECKS
    say "$1"
}

# ok LABEL, not_ok LABEL WHY, skip LABEL WHY: report a check.
ok() { say_check "ok $1"; }
not_ok() { say_check "not ok $1: $2"; }
skip() { say_check "skip $1: $2"; }

# complete_scenario: marks the end of the scenario, with the number of its checks. Without this line the scenario fails.
complete_scenario() { say "complete $(wc -l <$CHECKS)"; }

# note TEXT: prints a figure that is not judged.
note() { say "# $*"; }

# check LABEL COMMAND...: checks that the command succeeds. Its output stays in /tmp/check.out; the end of it is shown on failure.
check() {
    local label=$1
    shift
    if "$@" >/tmp/check.out 2>&1; then
        cat /tmp/check.out
        ok "$label"
    else
        local status=$?
        cat /tmp/check.out
        not_ok "$label" "\`$*\` ended with status $status: $(tail -n 3 /tmp/check.out | tr '\n' ' ')"
        return 1
    fi
}

# check_not LABEL COMMAND...: checks that the command fails.
check_not() {
    local label=$1
    shift
    if "$@" >/tmp/check.out 2>&1; then
        not_ok "$label" "\`$*\` succeeded: $(tail -n 3 /tmp/check.out | tr '\n' ' ')"
        return 1
    fi
    ok "$label"
}

# is LABEL GOT WANTED: checks that two values are equal.
is() {
    if [ "$2" = "$3" ]; then
        ok "$1"
    else
        not_ok "$1" "'$2' instead of '$3'"
        return 1
    fi
}

# wait_for_checks PID: waits for a subshell that makes checks beside this shell. Fails if it did not end by itself.
wait_for_checks() {
    local status=0
    wait $1 || status=$?
    # 1 is the status of a failed check, which has its own line.
    [ $status -le 1 ] || not_ok 'checks in a subshell' "it ended with status $status"
}

# give_up WHY: ends a scenario whose further checks have no meaning. The scenario fails.
give_up() {
    note "$*"
    exit 1
}
