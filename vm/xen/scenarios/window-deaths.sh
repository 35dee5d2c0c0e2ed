# title: a guest and its driver domain are destroyed in turn while packets flow through windows
# group: window-long
# set: name
# machine: xen-pvh
# limit: 1200
# driver: window

. /vm/xen/window.sh

# In each cycle both sides die once. The fifty deaths of a release: --set CYCLES=25.
CYCLES=${CYCLES:-1}

# loaded: streams both ways, which do not end before the death.
loaded() {
    on net 'killall traffic 2>/dev/null; receive 6000; { traffic echo 7000 >/dev/null 2>&1 & }'
    on one "{ traffic send $ADDRESS 6000 2000 >/tmp/sending 2>&1 & }; { traffic pulse $ADDRESS 7000 100 >/tmp/pulse 2>&1 & }"
    local before=$(received_bytes)
    wait_for 20 more_than $((before + 4000000))
}

received_bytes() {
    on net 'cat /sys/class/net/xenbr0/statistics/rx_bytes' | tr -d '\r' | grep .
}

more_than() {
    [ $(received_bytes) -gt $1 ]
}

# dies VICTIM SURVIVOR: 10 checks. A new guest has traffic through its windows when one of the two is destroyed.
dies() {
    local number
    attached_windows one 11
    check "cycle $cycle: packets flow" loaded
    check "cycle $cycle: two windows are open" windows_are 2
    number=$(domain $1)
    xl destroy $1
    check "cycle $cycle: $1 is destroyed under load, and is no zombie" wait_for 30 is_not_there $number
    check "cycle $cycle: no window is left" wait_for 10 windows_are 0
    check "cycle $cycle: $2 lives" on $2 'head -c 1048576 /dev/urandom | sha256sum'
}

plan $((CYCLES * 26))
guests_with window
before=$(free_memory)
cycle=0
while [ $cycle -lt $CYCLES ]; do
    cycle=$((cycle + 1))
    driver_domain '[network]\nmode = "window"\n'
    dies one net
    dies net one
    xl destroy one
    wait_for 30 alone
    is "cycle $cycle: the memory is free again" "$(free_memory)" "$before"
    note "cycle $cycle: free memory $(free_memory) MiB, before $before"
done
