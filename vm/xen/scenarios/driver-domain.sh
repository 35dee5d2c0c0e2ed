# title: a driver domain that is not dom0
# set: all
# machine: xen
# limit: 120

# The driver domain has a bridge of its own; it, not dom0, is who guests talk to.
driver() {
    on net "load tun bridge xen-gntdev; ip link add xenbr0 type bridge && ip link set xenbr0 up &&
        ip address add $ADDRESS/24 dev xenbr0 && ip -6 address add $ADDRESS6/64 dev xenbr0"
}

serving() {
    on net 'touch /tmp/serve.toml; ringfence serve --config /tmp/serve.toml >/tmp/serve.log 2>&1 &'
    on net 'wait_for 15 ringfence status'
}

# In a driver domain hotplug scripts are run by `xl devd`, for which this one has no toolstack.
hotplug() {
    XENBUS_PATH=/local/domain/$(domain net)/backend/vif/$(domain one)/0 /etc/xen/scripts/vif-ringfence online
}

check_not 'dom0 has no backend loaded' grep -E '^xen_(netback|blkback) ' /proc/modules
MEMORY=192
check 'the driver domain is created' guest net driver_domain=1
check 'it takes commands' guest_ready net || give_up 'nothing to see'
check 'it has a bridge' driver
check 'it serves' serving
SCRIPT=vif-ringfence
check 'a guest of the driver domain is created' guest one "$(vif 11 backend=net)"
check 'its hotplug script runs' hotplug
check 'it has a network' ready_with_address one 11
is 'dom0 serves nobody' "$(key $BACKEND/vif)" ''
transfer 'guest to driver domain' one net $ADDRESS 16
transfer 'driver domain to guest, IPv6' net one fd77::11 16
note "$(on net 'cat /tmp/serve.log' | tail -n 3 | tr '\n' ' ')"
number=$(domain one)
check 'the guest is destroyed' xl destroy one
check 'the driver domain has let go of everything' wait_for 10 is_not_there $number
complete
