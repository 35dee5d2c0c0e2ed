# title: a machine's network card on `passt`: DHCP, router advertisements, DNS, ping, TCP and UDP in both directions
# set: all
# machine: linux-passt
# limit: 90

. /vm/linux/passt.sh
check_card
complete_scenario
