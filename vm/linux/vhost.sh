# Helpers for scenarios of `run --link vhost`: guests of one command each.

# run_guest OPTIONS MTU COMMAND...: runs a command in a guest over vhost-net. OPTIONS are words for `ringfence run`, or ''.
run_guest() {
    local options=$1 mtu=$2
    shift 2
    # Split on purpose.
    # shellcheck disable=SC2086
    ringfence run --switch none --link vhost --mtu $mtu $options -- "$@"
}

# check_sending OPTIONS MTU MEBIBYTES: checks that a stream from a guest arrives outside.
check_sending() {
    outside sh -c 'traffic receive 7000 >/tmp/sum.out' &
    local receiver=$!
    check "a guest sends by vhost, MTU $2 $1" run_guest "$1" $2 timeout $((30 * PATIENCE)) traffic send 10.78.0.2 7000 $3
    wait_for 5 test -s /tmp/sum.out
    kill $receiver 2>/dev/null
    is "all of it arrived (vhost, MTU $2 $1)" "$(cat /tmp/sum.out)" "$(traffic sum $3)"
    rm -f /tmp/sum.out
}

# check_receiving OPTIONS MTU MEBIBYTES: checks that a stream from outside arrives in a guest, by a forwarded port.
check_receiving() {
    run_guest "$1 -p 7001:7001" $2 timeout $((30 * PATIENCE)) traffic receive 7001 >/tmp/sum.in &
    local guest=$!
    # As a guest may be late to listen, the sender tries again.
    check "a guest is sent to by vhost, MTU $2 $1" \
        wait_for 10 outside timeout $((30 * PATIENCE)) traffic send 10.78.0.1 7001 $3
    wait_for 5 test -s /tmp/sum.in
    kill $guest 2>/dev/null
    is "all of it arrived there (vhost, MTU $2 $1)" "$(cat /tmp/sum.in)" "$(traffic sum $3)"
    rm -f /tmp/sum.in
}

# guest_process: prints the id of the process in the guest that runs `traffic`.
guest_process() {
    local each
    for each in $(pidof traffic); do
        [ "$(readlink /proc/$each/ns/net)" = "$(readlink /proc/$OUTSIDE/ns/net)" ] || echo $each
    done | head -n 1
}

# guest_has_sent BYTES: succeeds if the guest's interface has sent more than that.
guest_has_sent() {
    local pid bytes
    pid=$(guest_process)
    [ -n "$pid" ] || return 1
    bytes=$(awk '/up0:/ { sub("up0:", "up0: "); print $10 }' /proc/$pid/net/dev)
    [ "${bytes:-0}" -gt $1 ]
}

# check_link_loss WHAT COMMAND...: checks that `run` fails with a reason when the command ends the link of a guest that sends,
# and that the stream is right up to that point.
check_link_loss() {
    local what=$1
    shift
    outside sh -c 'traffic beginning 7002 >/tmp/beginning' &
    run_guest '' 65520 traffic send 10.78.0.2 7002 4000 >/tmp/run.out 2>&1 &
    local run=$!
    check "a guest sends ($what)" wait_for 20 guest_has_sent $((8 << 20))
    check "$what" "$@"
    check "run ends ($what)" wait_for 20 has_ended $run
    wait $run
    is "it has failed ($what)" $(($? != 0)) 1
    check "it says why ($what)" grep -i 'uplink' /tmp/run.out
    tail -n 2 /tmp/run.out
    check "what came until then is right ($what)" wait_for 20 grep -q right /tmp/beginning
    cat /tmp/beginning
    rm -f /tmp/beginning
}

# has_ended PID: succeeds if the process does not exist any more.
has_ended() {
    ! kill -0 $1 2>/dev/null
}

# remove_interface: deletes the guest's interface while the kernel's worker uses it.
remove_interface() {
    nsenter -t $(guest_process) -n ip link delete up0
}

# kill_uplink: ends the process in whose memory the kernel's worker works.
kill_uplink() {
    local each
    for each in /proc/[0-9]*; do
        case "$(tr '\0' ' ' <$each/cmdline)" in *'internal uplink'*) kill -9 ${each##*/} ;; esac
    done 2>/dev/null
}
