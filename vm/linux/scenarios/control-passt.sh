# title: for comparison: what `passt` checks, with this computer's own passt
# set: name
# machine: linux-passt-debian
# limit: 90

. /vm/linux/passt.sh
# Debian's passt maps the gateway to the host's loopback.
check_card 192.0.2.1 2001:db8:1::1
complete_scenario
