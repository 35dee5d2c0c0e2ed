# title: a driver domain that is not dom0
# set: all
# machine: xen
# limit: 120

# create_driver_bridge: creates a bridge in the driver domain, which has dom0's addresses for guests.
create_driver_bridge() {
    on net "load_modules tun bridge xen-gntdev; ip link add xenbr0 type bridge && ip link set xenbr0 up &&
        ip address add $ADDRESS/24 dev xenbr0 && ip -6 address add $ADDRESS6/64 dev xenbr0"
}

start_driver_daemon() {
    on net 'touch /tmp/serve.toml; ringfence serve --config /tmp/serve.toml >/tmp/serve.log 2>&1 &'
    on net 'wait_for 15 ringfence status'
}

# run_hotplug_script: runs the interface's script, because this driver domain has no toolstack for `xl devd`.
run_hotplug_script() {
    XENBUS_PATH=/local/domain/$(domain_id net)/backend/vif/$(domain_id one)/0 /etc/xen/scripts/vif-ringfence online
}

check_not 'dom0 has no backend loaded' grep -E '^xen_(netback|blkback) ' /proc/modules
MEMORY=192
check 'the driver domain is created' create_guest net driver_domain=1
check 'it takes commands' guest_ready net || give_up 'nothing to see'
check 'it has a bridge' create_driver_bridge
check 'it serves' start_driver_daemon
SCRIPT=vif-ringfence
check 'a guest of the driver domain is created' create_guest one "$(vif_line 11 backend=net)"
check 'its hotplug script runs' run_hotplug_script
check 'it has a network' start_network one 11
is 'dom0 serves nobody' "$(read_key $BACKEND/vif)" ''
check_transfer 'guest to driver domain' one net $ADDRESS 16
check_transfer 'driver domain to guest, IPv6' net one fd77::11 16
note "$(on net 'cat /tmp/serve.log' | tail -n 3 | tr '\n' ' ')"
number=$(domain_id one)
check 'the guest is destroyed' xl destroy one
check 'the driver domain has let go of everything' wait_for 10 domain_is_gone $number
complete_scenario
