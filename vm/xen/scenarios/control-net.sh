# title: for comparison: the same guest, served by the kernel's own xen-netback
# set: core
# machine: xen-netback
# limit: 90

plan 9
check 'xen-netback is loaded' modprobe xen-netback
check 'dom0 has a bridge' bridge
check 'a guest is created' guest control "vif=['mac=00:16:3e:77:00:02,script=vif-control']" ||
    give_up 'without a guest there is nothing to see'
check 'it takes commands' guest_ready control
check 'it has an interface' address control 2
check 'dom0 answers' on control "ping -c 3 -i 0.2 $ADDRESS"
busy=$(cpu_seconds Domain-0)
transfer 'TCP from the guest' control dom0 $ADDRESS 64
note "dom0 used $(awk "BEGIN { print $(cpu_seconds Domain-0) - $busy }") s of processor time"
busy=$(cpu_seconds Domain-0)
transfer 'TCP to the guest' dom0 control 10.77.0.2 64
note "dom0 used $(awk "BEGIN { print $(cpu_seconds Domain-0) - $busy }") s of processor time"
transfer 'TCP over IPv6' control dom0 $ADDRESS6 8
