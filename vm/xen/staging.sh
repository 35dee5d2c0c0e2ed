# Helpers for scenarios with staging grants.

# Number of pages that `ringfence attach` stages for a queue.
ATTACH_PAGES=528

# daemon_operations: prints the number of map, unmap and copy operations of the daemon so far.
daemon_operations() {
    ringfence status --json | grep -oE '"grant_(maps|unmaps|copies)": *[0-9]+' |
        awk '{ sum += $NF } END { print sum + 0 }'
}

# vif_frames NAME: prints the number of frames that passed the guest's first interface.
vif_frames() {
    vif_status_sum $1 '"(rx|tx)_frames"'
}

# staged_page_count NAME: prints the number of the guest's staged pages.
staged_page_count() {
    vif_status_sum $1 '"staged_pages"'
}

# vif_status_sum NAME PATTERN: prints the sum of the matching values in the status of the guest's first interface.
vif_status_sum() {
    ringfence status --json | awk -v vif="\"vif$(domain_id $1).0\"" -v key="$2" '
        $1 == "\"name\":" { ours = index($2, vif) } ours && $1 ~ key { sum += $2 } ours && /"tap":/ { ours = 0 }
        END { print sum + 0 }'
}

# attach_with_staging NAME N QUEUES: checks that a guest starts, and that `ringfence attach` uses its interface and
# stages all pages.
attach_with_staging() {
    create_networked_guest $1 $2
    on $1 'echo vif-0 >/sys/bus/xen/drivers/vif/unbind; load_modules tun; echo 4096 >/sys/module/xen_gntalloc/parameters/limit'
    on $1 "ringfence attach --device 0 --name eth0 --staging --queues $3 -v >/tmp/attach.log 2>&1 & echo \$! >/tmp/attach.pid"
    check "ringfence attach gives $1 its interface" configure_network $1 $2 ||
        note "$(on $1 'tail -n 5 /tmp/attach.log')"
    check "all its $((ATTACH_PAGES * $3)) pages are staged" wait_for 40 has_staged $1 $((ATTACH_PAGES * $3))
}

# has_staged NAME PAGES: succeeds if the guest has that many staged pages.
has_staged() {
    [ "$(staged_page_count $1)" -eq $2 ]
}

# check_packets_cost_no_operation LABEL NAME N [MOST [MEBIBYTES]]: checks that streams both ways cost at most MOST
# grant operations (0 by default). Guests beside it for which the daemon copies take some of what is sent to the whole
# bridge.
check_packets_cost_no_operation() {
    local before=$(daemon_operations) frames=$(vif_frames $2)
    check_streams $2 $3 ${5:-16}
    note "$1: $(($(vif_frames $2) - frames)) frames, $(($(daemon_operations) - before)) grant operations"
    # 64 MiB in four streams are 1,024 packets of the largest length, without acknowledgements.
    check "$1: that was a thousand packets or more" test $(($(vif_frames $2) - frames)) -gt $((${5:-16} * 64))
    check "$1: none of them cost a grant operation" test $(($(daemon_operations) - before)) -le ${4:-0}
}
