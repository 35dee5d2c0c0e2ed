# Runs the scenarios of this boot, one after the other, and tidies up after each. Sourced by init.

. /vm/orders
. /vm/lib/checks.sh
[ $SUITE = linux ] || . /vm/xen/left.sh

# What a scenario leaves behind must not reach the next one: processes, domains, interfaces.
tidy_up() {
    local each
    for each in $(processes); do
        case " $RESIDENT " in *" $each "*) ;; *) kill -9 $each ;; esac
    done 2>/dev/null
    [ $SUITE = linux ] || destroy_all
    for each in /sys/class/net/*; do
        each=${each##*/}
        case $each in lo|sit0|dummy0) ;; *) ip link delete $each ;; esac
    done 2>/dev/null
    # Which of the kernel's own backends are there is what a scenario asked for, not the one before it.
    rmmod xen_netback xen_blkback 2>/dev/null
    rm -rf /tmp/*
}

# Those of users: a kernel thread has no command line.
processes() {
    local each
    for each in /proc/[0-9]*; do
        [ -z "$(tr -d '\0' <$each/cmdline)" ] || echo ${each##*/}
    done 2>/dev/null
}

# What a scenario leaves running is destroyed while whoever serves it is still there; then the hypervisor
# must have nothing of it. The youngest first: a driver domain is older than its guests. Whose backend
# is gone already is only destroyed.
look_behind() {
    local domain
    for domain in $(xenstore-list /local/domain | sort -rn); do
        [ $domain != 0 ] || continue
        xl destroy $domain
        wait_for 10 nothing_left $domain ||
            say "left of domain $domain: $(grants_in_use $domain; channels_to $domain; xl list | tail -n +2)"
    done
} 2>/dev/null

destroy_all() {
    local domain
    for domain in $(xenstore-list /local/domain); do
        [ $domain = 0 ] || xl destroy $domain
    done
    for domain in $(xenstore-list /local/domain/0/backend); do
        xenstore-rm /local/domain/0/backend/$domain
    done
} 2>/dev/null

RESIDENT=$(processes | tr '\n' ' ')
say "up $(uptime_now)"
while read -r name limit; do
    [ -n "$name" ] || continue
    say "begin $name"
    timeout -s KILL $((limit * PATIENCE)) sh /vm/lib/scenario.sh $name >/share/$name.log 2>&1 </dev/null
    status=$?
    [ $SUITE = linux ] || look_behind
    [ $status -lt 128 ] || say "# killed, at its limit of $((limit * PATIENCE)) s or by something else"
    say "end $name $status"
    tidy_up
done <<END
$SCENARIOS
END
say down
