# Runs the scenarios of this boot, one after the other, and tidies up after each. Sourced by init.

. /vm/orders
. /vm/lib/checks.sh
[ $SUITE = linux ] || . /vm/xen/left.sh

# remove_leftovers: ends the processes, domains and interfaces that a scenario left, and empties /tmp, before the next
# scenario starts.
remove_leftovers() {
    local each
    for each in $(user_processes); do
        case " $RESIDENT " in *" $each "*) ;; *) kill -9 $each ;; esac
    done 2>/dev/null
    [ $SUITE = linux ] || destroy_domains
    for each in /sys/class/net/*; do
        each=${each##*/}
        case $each in lo|sit0|dummy0) ;; *) ip link delete $each ;; esac
    done 2>/dev/null
    # Each scenario loads the backends and our modules that it uses, with parameters of its own.
    for each in xen_netback xen_blkback ringfence_lent_pool; do
        rmmod $each
    done 2>/dev/null
    rm -rf /tmp/*
}

# user_processes: prints the ids of all processes but kernel threads, which have no command line.
user_processes() {
    local each
    for each in /proc/[0-9]*; do
        [ -z "$(tr -d '\0' <$each/cmdline)" ] || echo ${each##*/}
    done 2>/dev/null
}

# destroy_and_inspect: destroys the domains of a scenario while their backends still run, and reports what the
# hypervisor then has of them. The youngest domain comes first, because a driver domain is older than its guests. A
# domain whose backend has ended already is only destroyed.
destroy_and_inspect() {
    local domain
    for domain in $(xenstore-list /local/domain | sort -rn); do
        [ $domain != 0 ] || continue
        xl destroy $domain
        wait_for 10 nothing_left $domain ||
            say "left of domain $domain: $(grants_in_use $domain; channels_to $domain; xl list | tail -n +2)"
    done
} 2>/dev/null

# destroy_domains: destroys all domains, and removes their directories of backends.
destroy_domains() {
    local domain
    for domain in $(xenstore-list /local/domain); do
        [ $domain = 0 ] || xl destroy $domain
    done
    for domain in $(xenstore-list /local/domain/0/backend); do
        xenstore-rm /local/domain/0/backend/$domain
    done
} 2>/dev/null

RESIDENT=$(user_processes | tr '\n' ' ')
say "up $(uptime_now)"
touch /share/ended
while read -r name limit; do
    [ -n "$name" ] || continue
    # A machine that has rebooted goes on with the scenario that rebooted it.
    ! grep -qx "$name" /share/ended || continue
    say "begin $name"
    timeout -s KILL $((limit * PATIENCE)) sh /vm/lib/scenario.sh $name >>/share/$name.log 2>&1 </dev/null
    status=$?
    [ $SUITE = linux ] || destroy_and_inspect
    [ $status -lt 128 ] || say "# killed, at its limit of $((limit * PATIENCE)) s or by something else"
    say "end $name $status"
    echo "$name" >>/share/ended
    remove_leftovers
done <<END
$SCENARIOS
END
say down
