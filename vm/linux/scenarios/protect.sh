# title: `run --protect fine`, and what it costs to lend vhost-net only what is under way
# set: all
# machine: linux-iommu
# limit: 240

load_modules vhost_net tun veth vfio_iommu_type1 vfio-pci
check 'vhost-net has its device' test -c /dev/vhost-net || give_up 'nothing to drive'
create_outside
check 'outside answers' ping -c 1 -W 5 10.78.0.2 || give_up 'no network'
# A guest's echo requests go out by sockets that this allows.
echo 0 2147483647 >/proc/sys/net/ipv4/ping_group_range
. /vm/linux/vhost.sh
check 'a guest pings outside' run_guest '--protect fine' 1500 ping -c 2 -W 5 10.78.0.2
for mtu in 1500 65520; do
    check_sending '--protect fine' $mtu 32
    check_receiving '--protect fine' $mtu 32
done
check_not 'it is for vhost-net only' ringfence run --switch none --protect fine -- true
bind_edu_to_vfio
ringfence-bench grant --cpus 1 --rounds 5 --vfio $name | tee /tmp/grant.out
is 'bench grant has a row of each engine for each way to revoke' \
    "$(grep -cE '^(issue|revoke|fresh again|revoke by force) +(window|iotlb|vfio) +1 +1 ' /tmp/grant.out)" 12
check 'bench seeds iommu measures every protection' \
    sh -c 'ringfence-bench seeds iommu --seconds 0.5 --rounds 5 | tee /tmp/iommu.out'
is 'both ways and sizes' "$(grep -c ' fine ' /tmp/iommu.out)" 4
complete_scenario
