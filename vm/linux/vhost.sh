# For scenarios of `run --link vhost`: guests of one command each.

# over LINK MTU COMMAND...: runs a command in a guest with that link. Options of run are in $OPTIONS.
over() {
    local link=$1 mtu=$2
    shift 2
    ringfence run --switch none --link $link --mtu $mtu ${OPTIONS:-} -- "$@"
}

# sends LINK MTU MEBIBYTES: checks that what a guest sends arrives outside.
sends() {
    over_there sh -c 'traffic receive 7000 >/tmp/sum.out' &
    local receiver=$!
    check "a guest sends by $1, MTU $2 ${OPTIONS:-}" over $1 $2 timeout $((30 * PATIENCE)) traffic send 10.78.0.2 7000 $3
    wait_for 5 test -s /tmp/sum.out
    kill $receiver 2>/dev/null
    is "all of it arrived ($1, MTU $2 ${OPTIONS:-})" "$(cat /tmp/sum.out)" "$(traffic sum $3)"
    rm -f /tmp/sum.out
}

# is_sent_to LINK MTU MEBIBYTES: the same in the other direction, by a forwarded port.
is_sent_to() {
    OPTIONS="${OPTIONS:-} -p 7001:7001" over $1 $2 timeout $((30 * PATIENCE)) traffic receive 7001 >/tmp/sum.in &
    local guest=$!
    # As a guest may be late to listen, the sender tries again.
    check "a guest is sent to by $1, MTU $2 ${OPTIONS:-}" \
        wait_for 10 over_there timeout $((30 * PATIENCE)) traffic send 10.78.0.1 7001 $3
    wait_for 5 test -s /tmp/sum.in
    kill $guest 2>/dev/null
    is "all of it arrived there ($1, MTU $2 ${OPTIONS:-})" "$(cat /tmp/sum.in)" "$(traffic sum $3)"
    rm -f /tmp/sum.in
}

# in_guest: the process in the guest that runs `traffic`.
in_guest() {
    local each
    for each in $(pidof traffic); do
        [ "$(readlink /proc/$each/ns/net)" = "$(readlink /proc/$OUTSIDE/ns/net)" ] || echo $each
    done | head -n 1
}

# is_loaded DIRECTION: whether the guest's interface has carried 8 MiB that way: 2 in, 10 out.
is_loaded() {
    local pid
    pid=$(in_guest)
    [ -n "$pid" ] || return 1
    local octets
    octets=$(awk -v field=$1 '/up0:/ { sub("up0:", "up0: "); print $field }' /proc/$pid/net/dev)
    [ "${octets:-0}" -gt $((8 << 20)) ]
}

# cut_off WHAT COMMAND...: while a guest sends, the command ends its link. What came until then must be right,
# and `run` must end, and say why.
cut_off() {
    local what=$1
    shift
    over_there sh -c 'traffic beginning 7002 >/tmp/beginning' &
    over vhost 65520 traffic send 10.78.0.2 7002 4000 >/tmp/run.out 2>&1 &
    local run=$!
    check "a guest sends ($what)" wait_for 20 is_loaded 10
    check "$what" "$@"
    check "run ends ($what)" wait_for 20 is_over $run
    wait $run
    is "it has failed ($what)" $(($? != 0)) 1
    check "it says why ($what)" grep -i 'uplink' /tmp/run.out
    tail -n 2 /tmp/run.out
    check "what came until then is right ($what)" wait_for 20 grep -q right /tmp/beginning
    cat /tmp/beginning
    rm -f /tmp/beginning
}

is_over() {
    ! kill -0 $1 2>/dev/null
}

# remove_interface: takes the interface away from under the kernel's worker.
remove_interface() {
    nsenter -t $(in_guest) -n ip link delete up0
}

# kill_uplink: ends the process in whose memory the worker works.
kill_uplink() {
    local each
    for each in /proc/[0-9]*; do
        case "$(tr '\0' ' ' <$each/cmdline)" in *'internal uplink'*) kill -9 ${each##*/} ;; esac
    done 2>/dev/null
}
