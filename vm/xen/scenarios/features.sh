# title: every feature that a guest is offered, off one at a time
# set: all
# machine: xen
# limit: 240

# round LABEL KEY VALUE LINE...: 7 checks. With these lines under [network], the guest's driver connects
# anew, KEY of the backend has VALUE (`-` where it must not be there), and traffic flows.
round() {
    local label=$1 key=$2 value=$3
    shift 3
    check "$label: configured" reload '[network]' "$@"
    check "$label: connected" on dom0 'rebind one && again_with_address one 11'
    [ $value != - ] || value=
    is "$label: $key" "$(key $BACKEND/vif/$(domain one)/0/$key)" "$value"
    streams one 11 8
}

use_ringfence
networked one 11
round 'no scatter-gather' feature-sg 0 'offloads = "csum4,csum6"'
round 'no TSO over IPv4' feature-gso-tcpv4 0 'offloads = "sg,tso6,csum4,csum6"'
round 'no TSO over IPv6' feature-gso-tcpv6 0 'offloads = "sg,tso4,csum4,csum6"'
round 'no checksums over IPv4' feature-no-csum-offload 1 'offloads = "sg,csum6"'
round 'no checksums over IPv6' feature-ipv6-csum-offload 0 'offloads = "sg,tso4,csum4"'
round 'nothing' feature-sg 0 'offloads = "none"'
round 'no multicast control' feature-multicast-control 0 'multicast-control = false'
complete
