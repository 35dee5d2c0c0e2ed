# title: domains with grant windows die under load, over and over, and leave nothing
# group: window-long
# set: name
# machine: xen-pvh
# limit: 1200
# driver: window-tests
# hypervisor: debug

. /vm/xen/window.sh

# Each side dies in turn while the granter issues and revokes and the grantee touches its window. One death a cycle: the
# fifty of a release are --set CYCLES=50.
CYCLES=${CYCLES:-4}

# connect_window HANDLE: checks that the grantee registers the window, and starts load on it.
connect_window() {
    matches "cycle $cycle: the grantee registers" "$(grantee dev-open; grantee dev-register $(domain_id one) $1 1024)" '*ok'
    granter churn $1 1000 >/dev/null
    grantee touch 1024 >/dev/null
    sleep 2
}

create_window() {
    granter create $(domain_id two) 1024 | sed 's/.*handle //'
}

before=$(free_memory)
cycle=0
while [ $cycle -lt $CYCLES ]; do
    cycle=$((cycle + 1))
    # The survivor of the last cycle stays.
    for each in one two; do
        [ -n "$(domain_id $each 2>/dev/null)" ] || create_window_guest $each 'type="pvh"' || give_up "no guest $each"
    done
    is "cycle $cycle: the granter is idle" "$(granter churned stop | cut -d' ' -f1)" rounds
    connect_window $(create_window)
    case $((cycle % 2)) in
        0) victim=one ;;
        *) victim=two ;;
    esac
    number=$(domain_id $victim)
    check "cycle $cycle: $victim is destroyed" xl destroy $victim
    check "cycle $cycle: it leaves no zombie" wait_for 30 domain_is_gone $number
    is "cycle $cycle: no window is left" "$(dump_windows | grep -c ' window .* to d')" 0
    # The thread that touches the window must end before it is unmapped.
    [ $victim = two ] || { grantee touched stop >/dev/null; sleep 1; grantee dev-close >/dev/null; }
    note "cycle $cycle: $victim; free $(free_memory) MiB of $before"
done
for each in one two; do xl destroy $each 2>/dev/null; done
check 'all domains are gone' wait_for 30 sh -c '[ $(xl list | wc -l) = 2 ]'
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
