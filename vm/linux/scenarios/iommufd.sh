# title: a device behind an IOMMU that is managed by iommufd reaches what was granted and nothing else
# set: name
# machine: linux-iommufd
# limit: 300

check 'the IOMMU is on' test -e /sys/class/iommu/dmar0
check 'the kernel has iommufd' test -c /dev/iommu || give_up 'no iommufd'
bind_edu_to_vfio || give_up 'no device'
for entry in $device/vfio-dev/*; do
    check 'the device has a file of its own' test -c /dev/vfio/devices/${entry##*/}
done
check 'the kernel was told to be strict' engines vfio $name strict
engines vfio $name conformance | tee /tmp/best.out
is 'of the two interfaces the newer one is taken' "$(tail -n 1 /tmp/best.out)" 'iommufd: 14 passed, 0 failed'
for by in iommufd type1; do
    check "what was revoked is refused, and the kernel names its address ($by)" engines vfio $name fault --by $by
    check "a page revoked in flight is old or new as a whole ($by)" engines vfio $name in-flight --by $by
    check "a device that has a user has no second one ($by)" engines vfio $name twice --by $by
done
check 'the older interface passes the suite as well' engines vfio $name conformance --by type1
ringfence-bench grant --cpus 1 --rounds 5 --vfio $name | tee /tmp/grant.out
is 'bench grant has a row of iommufd for each operation' "$(grep -c ' iommufd ' /tmp/grant.out)" 5
complete_scenario
