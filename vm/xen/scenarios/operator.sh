# title: a guest is held to its address; what operators see; a configuration that is read again
# set: core
# machine: xen
# limit: 90

FOREIGN=02:00:00:00:00:99
LOG=/share/serve-$SCENARIO.log

# with_address MAC: guest one sends with this address, and dom0 answers.
with_address() {
    on one "ip link set eth0 down && ip link set eth0 address $1 && ip link set eth0 up &&
        ping -c 4 -W 2 $ADDRESS"
}

# counter NAME: its sum over all interfaces.
counter() {
    ringfence status --json | grep -o "\"$1\": *[0-9]*" | awk '{ sum += $NF } END { print sum + 0 }'
}

# scraped PATTERN: a line of the metrics matches.
scraped() {
    wget -q -O - http://127.0.0.1:9709/metrics >/tmp/metrics && grep -E "$1" /tmp/metrics
}

logged() {
    wait_for 10 grep -q "$1" $LOG
}

# reloaded_with LINE: whatever is wrong with it.
reloaded_with() {
    configure "$@" && kill -HUP $SERVE
}

use_ringfence '[metrics]' 'listen = "127.0.0.1:9709"'
networked one 11
check 'a guest with nothing but script=' guest plain "vif=['script=vif-ringfence']"
check 'has a network' ready_with_address plain 12
vif=vif$(domain one).0

check_not "another's address is of no use" with_address $FOREIGN
check 'what it sent was counted' test "$(counter drop_spoofed_source)" -gt 0
check 'with its own it is heard' with_address 00:16:3e:77:00:0b

check 'status tells what it is' on dom0 "ringfence status --json | grep -q '\"mac\": *\"00:16:3e:77:00:0b\"'"
check 'metrics tell that it is connected' scraped "^ringfence_vif_connected\{vif=\"$vif\"\} 1$"
check 'and what it is' scraped "^ringfence_vif_info\{vif=\"$vif\",.*domain=\"one\",.*mac=\"00:16:3e:77:00:0b\""
check 'and what was dropped' scraped "^ringfence_vif_drops_total\{vif=\"$vif\",reason=\"spoofed_source\"\} [1-9]"
is 'and end as they must' "$(tail -n 1 /tmp/metrics)" '# EOF'

check 'a wrong configuration' reloaded_with '[network]' 'chek-source = false'
check 'is refused with its place' logged 'serve.toml:2:1: unknown key `chek-source`; did you mean `check-source`'
check 'and changes nothing' on one "ping -c 4 -W 2 $ADDRESS"
check 'a right one' reload '[network]' 'check-source = false'
check 'is read' logged 'network.check-source for devices that connect from now on'
check_not 'who is connected is still held to its address' with_address $FOREIGN
check 'who connects anew' on dom0 'with_address 00:16:3e:77:00:0b; rebind one && again_with_address one 11'
check 'may use another' with_address $FOREIGN
complete
