# Helpers for scenarios on a hypervisor with grant windows (xen/ in the repository). The test agent, its module and the
# driver are in /window of every guest; xen/tests/run.sh puts them there.

# window_guest NAME [LINE...]: a guest with the modules and the agent.
window_guest() {
    local name=$1
    shift
    guest $name "$@" && guest_ready $name && on $name '
        insmod /window/window-raw.ko && insmod /window/ringfence-window.ko &&
        { agent serve >/tmp/agent.log 2>&1 & } && wait_for 20 test -p /run/agent.out'
}

# a, b COMMAND...: a command to the agent in the granter, in the grantee.
a() {
    on one "agent $*" | tr -d '\r' | grep .
}
b() {
    on two "agent $*" | tr -d '\r' | grep .
}

# like LABEL GOT PATTERN
like() {
    case $2 in
        $3) ok "$1" ;;
        *) not_ok "$1" "'$2' is not like '$3'" ;;
    esac
}

# free_memory: the hypervisor's free pages in MiB.
free_memory() {
    xl info | awk '/^free_memory/ { print $3 }'
}

# dump_windows: what the hypervisor knows of windows.
dump_windows() {
    xl dmesg -c >/dev/null
    xl debug-keys y
    usleep 300000
    xl dmesg
}

# window_module NAME: loads the driver from the part `window` of a guest.
window_module() {
    on $1 'insmod /lib/ringfence-window.ko && wait_for 5 test -c /dev/ringfence-window'
}
