# title: a PCI device behind an emulated IOMMU can be given to a program by VFIO
# set: all
# machine: linux-iommu
# limit: 30

plan 4
load vfio_iommu_type1 vfio-pci
check 'the IOMMU is on' test -e /sys/class/iommu/dmar0
# QEMU's teaching device (docs/specs/edu.rst).
device=$(grep -l 0x11e8 /sys/bus/pci/devices/*/device | head -n 1)
device=${device%/device}
check 'the device is there' test -n "$device"
echo vfio-pci >$device/driver_override
echo ${device##*/} >/sys/bus/pci/drivers/vfio-pci/bind
group=$(readlink $device/iommu_group)
is 'it is alone in its group' "$(ls $device/iommu_group/devices)" "${device##*/}"
check 'its group can be opened' test -c /dev/vfio/${group##*/}
