# The checks of a scenario. Each is one line to the harness; what they say is in vm/README.md.
# Scenarios of clients/ use them, too, and write their results to a file.

RESULTS=${RESULTS:-/dev/ttyS1}

say() {
    echo "$*" >>$RESULTS
    echo "$(uptime_now) $*"
}

# plan N: how many checks will be made.
plan() { say "plan $1"; }

# ok LABEL, not_ok LABEL WHY, skip LABEL WHY
ok() { say "ok $1"; }
not_ok() { say "not ok $1: $2"; }
skip() { say "skip $1: $2"; }

# note TEXT: worth knowing, not judged.
note() { say "# $*"; }

# check LABEL COMMAND...: the command succeeds. What it wrote is kept, and shown if it fails.
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

# check_not LABEL COMMAND...: the command fails.
check_not() {
    local label=$1
    shift
    if "$@" >/tmp/check.out 2>&1; then
        not_ok "$label" "\`$*\` succeeded: $(tail -n 3 /tmp/check.out | tr '\n' ' ')"
        return 1
    fi
    ok "$label"
}

# is LABEL GOT WANTED
is() {
    if [ "$2" = "$3" ]; then
        ok "$1"
    else
        not_ok "$1" "'$2' instead of '$3'"
        return 1
    fi
}

# give_up WHY: nothing that would follow makes sense any more.
give_up() {
    note "$*"
    exit 1
}
