# title: a device behind an IOMMU, and the worker of vhost-net, reach what was granted and nothing else
# set: core
# machine: linux-iommu
# limit: 240

load_modules vfio_iommu_type1 vfio-pci
check 'the IOMMU is on' test -e /sys/class/iommu/dmar0
bind_edu_to_vfio || give_up 'no device'
group=$(readlink $device/iommu_group)
is 'it is alone in its group' "$(ls $device/iommu_group/devices)" "$name"
check 'its group can be opened' test -c /dev/vfio/${group##*/}
# Otherwise what is said of revocation below would be said of luck.
check 'the kernel was told to be strict' engines vfio $name strict
check 'the engine passes the suite of all engines' engines vfio $name conformance
check 'what was revoked is refused, and the kernel names its address' engines vfio $name fault
check 'a page revoked in flight is old or new as a whole' engines vfio $name in-flight
check 'a device that has a user has no second one' engines vfio $name twice
check_not 'a device that is in no group is told of' engines vfio 0000:ff:1f.7 conformance
# The kernel's own translation, that of vhost.
load_modules vhost_net tun
check 'vhost-net has its device' test -c /dev/vhost-net || give_up 'nothing to drive'
check 'the engine iotlb passes the suite of all engines' engines iotlb conformance
check 'no more is issued than the kernel keeps' engines iotlb entries
check 'a miss can be answered by issuing the page' engines iotlb fault-in
check 'a miss that is refused ends that link alone, and is counted' engines iotlb refused
check 'what was revoked while packets come in is not written' engines iotlb canary 20
check 'packets arrive from and to pages that are revoked and issued at random' engines iotlb traffic 100000
complete_scenario
