# title: a device of the grantee reaches a page of a window while it is issued, and faults before and after
# group: window-long
# set: name
# machine: xen-iommu
# limit: 300
# driver: window-tests
# options: iommu=verbose,no-sharept

. /vm/xen/window.sh

# The device edu belongs to the grantee, so its addresses are the grantee's frames. Dom0 writes its registers.

# dma read|write REF: the device copies between its buffer and the page of a reference.
dma() {
    agent dma $EDU/resource0 $1 $(((base + $2) * 4096)) | grep done
}

agent_in_dom0
EDU=$(device_of 0x1234 0x11e8)
check 'the hypervisor has an IOMMU' sh -c 'xl info | grep -E "virt_caps.*directio"' || give_up 'no IOMMU'
check 'the device is there' test -n "$EDU" || give_up 'no device'
before=$(free_memory)
check 'a granter is created' window_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee with an IOMMU context is created' with_iommu two 'type="pvh"' || give_up 'no grantee'
A=$(domain one) B=$(domain two)
check 'the device is given to the grantee' assigned $EDU || give_up 'no device to try'
enable_device $EDU
like 'a window is created' "$(a create $B 64)" 'rc 0 status 0 handle 0'
b dev-open >/dev/null
like 'it registers' "$(b dev-register $A 0 64)" ok
base=$(on two cat /sys/module/ringfence_window/parameters/base | tr -d '\r' | grep .)
faults >/dev/null

a fill 0 what-the-device-reads >/dev/null
a fill 1 empty >/dev/null
a fill 2 read-only >/dev/null
a fill 3 neighbour >/dev/null
check 'DMA from a reference that is not issued ends' dma read 5
is 'it faults' "$(faults)" 1
like 'two pages are issued' "$(a issue 0 5 0 0 2)" '*ok 2*'
check 'the device reads one' dma read 5
check 'and writes the other' dma write 6
is 'without a fault' "$(faults)" 0
is 'what it read is what it wrote' "$(a peek 1)" what-the-device-reads
like 'the second page is revoked' "$(a revoke 0 6 0)" '*ok 1*'
a fill 1 after-the-revoke >/dev/null
check 'DMA to it after that ends' dma write 6
is 'it faults' "$(faults)" 1
is 'and changes nothing' "$(a peek 1)" after-the-revoke
like 'a page is issued read-only' "$(a issue 0 7 2 1)" '*ok 1*'
# The write comes first: after a read the emulated IOMMU refuses it from its TLB and reports no fault.
check 'DMA to it ends' dma write 7
is 'it faults' "$(faults)" 1
is 'and changes nothing' "$(a peek 2)" read-only
check 'the device reads it' dma read 7
is 'without a fault' "$(faults)" 0
is 'nor was a neighbour changed' "$(a peek 3)" neighbour
for each in two one; do xl destroy $each; done
check 'the domains leave no zombie' wait_for 30 alone
is 'no window is left' "$(dump_windows | grep -c ' window .* to d')" 0
is 'the memory is free again' "$(free_memory)" "$before"
complete
