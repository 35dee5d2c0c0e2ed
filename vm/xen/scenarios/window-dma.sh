# title: a device of the grantee reaches a page of a window while it is issued, and faults before and after
# group: window-long
# set: name
# machine: xen-iommu
# limit: 300
# driver: window-tests
# options: iommu=verbose,no-sharept

. /vm/xen/window.sh

# The device edu belongs to the grantee, so its addresses are the grantee's frames. Dom0 writes its registers.

# run_dma read|write REF: lets the device copy between its buffer and the page of a reference.
run_dma() {
    agent dma $EDU/resource0 $1 $(((base + $2) * 4096)) | grep done
}

agent_in_dom0
EDU=$(find_pci_device 0x1234 0x11e8)
check 'the hypervisor has an IOMMU' sh -c 'xl info | grep -E "virt_caps.*directio"' || give_up 'no IOMMU'
check 'the device is there' test -n "$EDU" || give_up 'no device'
before=$(free_memory)
check 'a granter is created' create_window_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee with an IOMMU context is created' create_window_guest_with_iommu two 'type="pvh"' || give_up 'no grantee'
granter_id=$(domain_id one) grantee_id=$(domain_id two)
check 'the device is given to the grantee' assign_device $EDU $grantee_id || give_up 'no device to try'
enable_device $EDU
matches 'a window is created' "$(granter create $grantee_id 64)" 'rc 0 status 0 handle 0'
grantee dev-open >/dev/null
matches 'it registers' "$(grantee dev-register $granter_id 0 64)" ok
base=$(on two cat /sys/module/ringfence_window/parameters/base | tr -d '\r' | grep .)
count_dma_faults >/dev/null

granter fill 0 what-the-device-reads >/dev/null
granter fill 1 empty >/dev/null
granter fill 2 read-only >/dev/null
granter fill 3 neighbour >/dev/null
check 'DMA from a reference that is not issued ends' run_dma read 5
is 'it faults' "$(count_dma_faults)" 1
matches 'two pages are issued' "$(granter issue 0 5 0 0 2)" '*ok 2*'
check 'the device reads one' run_dma read 5
check 'and writes the other' run_dma write 6
is 'without a fault' "$(count_dma_faults)" 0
is 'what it read is what it wrote' "$(granter peek 1)" what-the-device-reads
matches 'the second page is revoked' "$(granter revoke 0 6 0)" '*ok 1*'
granter fill 1 after-the-revoke >/dev/null
check 'DMA to it after that ends' run_dma write 6
is 'it faults' "$(count_dma_faults)" 1
is 'and changes nothing' "$(granter peek 1)" after-the-revoke
matches 'a page is issued read-only' "$(granter issue 0 7 2 1)" '*ok 1*'
# The write comes first: after a read the emulated IOMMU refuses it from its TLB and reports no fault.
check 'DMA to it ends' run_dma write 7
is 'it faults' "$(count_dma_faults)" 1
is 'and changes nothing' "$(granter peek 2)" read-only
check 'the device reads it' run_dma read 7
is 'without a fault' "$(count_dma_faults)" 0
is 'nor was a neighbour changed' "$(granter peek 3)" neighbour
for each in two one; do xl destroy $each; done
check 'the domains leave no zombie' wait_for 30 only_dom0_is_left
is 'no window is left' "$(dump_windows | grep -c ' window .* to d')" 0
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
