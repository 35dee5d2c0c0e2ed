# title: a guest is held to its address; what operators see; a configuration that is read again
# set: core
# machine: xen
# limit: 90

FOREIGN=02:00:00:00:00:99
LOG=/share/serve-$SCENARIO.log

# ping_with_mac MAC: gives guest one this address, and pings dom0.
ping_with_mac() {
    on one "ip link set eth0 down && ip link set eth0 address $1 && ip link set eth0 up &&
        ping -c 4 -W 2 $ADDRESS"
}

# metrics_match PATTERN: reads the metrics, and succeeds if a line matches.
metrics_match() {
    wget -q -O - http://127.0.0.1:9709/metrics >/tmp/metrics && grep -E "$1" /tmp/metrics
}

log_has() {
    wait_for 10 grep -q "$1" $LOG
}

# reload_unchecked LINE...: gives the daemon a configuration without a check of its validity.
reload_unchecked() {
    write_configuration "$@" && kill -HUP $SERVE
}

use_ringfence '[metrics]' 'listen = "127.0.0.1:9709"'
create_networked_guest one 11
check 'a guest with nothing but script=' create_guest plain "vif=['script=vif-ringfence']"
check 'has a network' start_network plain 12
vif=vif$(domain_id one).0

check_not "another's address is of no use" ping_with_mac $FOREIGN
check 'what it sent was counted' test "$(daemon_counter drop_spoofed_source)" -gt 0
check 'with its own it is heard' ping_with_mac 00:16:3e:77:00:0b

check 'status tells what it is' on dom0 "ringfence status --json | grep -q '\"mac\": *\"00:16:3e:77:00:0b\"'"
# The commands of docs/serve.md.
check 'the configuration can be checked' on dom0 'ringfence serve --check'
check 'status lists the devices' on dom0 'ringfence status'
check 'and all counters' on dom0 'ringfence status --counters'
check 'and JSON' on dom0 'ringfence status --json'
check 'and rates' on dom0 'ringfence top'
check 'metrics tell that it is connected' metrics_match "^ringfence_vif_connected\{vif=\"$vif\"\} 1$"
check 'and what it is' metrics_match "^ringfence_vif_info\{vif=\"$vif\",.*domain=\"one\",.*mac=\"00:16:3e:77:00:0b\""
check 'and what was dropped' metrics_match "^ringfence_vif_drops_total\{vif=\"$vif\",reason=\"spoofed_source\"\} [1-9]"
is 'and end as they must' "$(tail -n 1 /tmp/metrics)" '# EOF'

check 'a wrong configuration' reload_unchecked '[network]' 'chek-source = false'
check 'is refused with its place' log_has 'serve.toml:2:1: unknown key `chek-source`; did you mean `check-source`'
check 'and changes nothing' on one "ping -c 4 -W 2 $ADDRESS"
check 'a right one' reload_daemon '[network]' 'check-source = false'
check 'is read' log_has 'network.check-source for devices that connect from now on'
check_not 'who is connected is still held to its address' ping_with_mac $FOREIGN
check 'who connects anew' on dom0 'ping_with_mac 00:16:3e:77:00:0b; rebind_netfront one && configure_network one 11'
check 'may use another' ping_with_mac $FOREIGN
complete_scenario
