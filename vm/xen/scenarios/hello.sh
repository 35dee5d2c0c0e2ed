# title: Xen boots, xl works, and a guest with an unmodified netfront starts
# set: core
# machine: xen
# limit: 40

check 'dom0 is a control domain' grep -q control_d /proc/xen/capabilities
check 'xl talks to the hypervisor' xl info
note "$(xl info | grep -E '^(release|xen_version)' | tr -s ' ' | tr '\n' ' ')"
check 'ringfence runs' ringfence --version
check_not 'the kernel has no backend loaded' grep -E '^xen_(netback|blkback)' /proc/modules
check 'a guest is created' create_guest hello || give_up 'without a guest there is nothing to see'
check 'it takes commands' guest_ready hello
check 'its netfront is the unmodified one' on hello 'test -d /sys/bus/xen/drivers/vif'
on hello 'exit 7'
is 'a status comes back' $? 7
complete_scenario
