# Helpers for scenarios with staging grants.

# operations: map, unmap and copy operations of the daemon so far, on whatever path.
operations() {
    ringfence status --json | grep -oE '"grant_(maps|unmaps|copies)": *[0-9]+' |
        awk '{ sum += $NF } END { print sum + 0 }'
}

# frames NAME: those that went through the first interface of a guest.
frames() {
    of_vif $1 '"(rx|tx)_frames"'
}

# staged NAME: pages that are kept mapped for it.
staged() {
    of_vif $1 '"staged_pages"'
}

# of_vif NAME PATTERN: the sum of what is called so, of the first interface of a guest.
of_vif() {
    ringfence status --json | awk -v vif="\"vif$(domain $1).0\"" -v key="$2" '
        $1 == "\"name\":" { ours = index($2, vif) } ours && $1 ~ key { sum += $2 } ours && /"tap":/ { ours = 0 }
        END { print sum + 0 }'
}

# attached_staging NAME N QUEUES: 4 checks. A guest whose interface `ringfence attach` has, with its
# pages staged.
attached_staging() {
    networked $1 $2
    on $1 'echo vif-0 >/sys/bus/xen/drivers/vif/unbind; load tun; echo 4096 >/sys/module/xen_gntalloc/parameters/limit'
    on $1 "ringfence attach --device 0 --name eth0 --staging --queues $3 -v >/tmp/attach.log 2>&1 & echo \$! >/tmp/attach.pid"
    check "ringfence attach gives $1 its interface" again_with_address $1 $2 ||
        note "$(on $1 'tail -n 5 /tmp/attach.log')"
    STAGED=$((528 * $3))
    check "all its $STAGED pages are staged" wait_for 40 all_staged $1
}

all_staged() {
    [ "$(staged $1)" -eq $STAGED ]
}

# no_operations LABEL NAME N [MOST [MEBIBYTES]]: 6 checks. Streams to and fro, and none of their packets costs a grant
# operation. With other guests on the bridge that are copied for, what is sent to all of them costs up to
# MOST.
no_operations() {
    local before=$(operations) frames=$(frames $2)
    streams $2 $3 ${5:-16}
    note "$1: $(($(frames $2) - frames)) frames, $(($(operations) - before)) grant operations"
    # 64 MiB in four streams are 1,024 packets of the largest length, without acknowledgements.
    check "$1: that was a thousand packets or more" test $(($(frames $2) - frames)) -gt $((${5:-16} * 64))
    check "$1: none of them cost a grant operation" test $(($(operations) - before)) -le ${4:-0}
}
