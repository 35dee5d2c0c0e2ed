# title: a network card that the grantee drives reaches exactly the pages that are issued
# group: window-long
# set: name
# machine: xen-iommu
# limit: 300
# driver: window-tests
# options: iommu=verbose,no-sharept

. /vm/xen/window.sh

# The card belongs to the grantee: its addresses are the grantee's frames, and its registers are mapped there. The driver
# (xen/tests/nic.c) has the card send to itself, from the page of one reference into that of another.
REGISTERS=0xf0000

# nic_sends FROM TO: lets the card send a frame from the page of one reference into that of another. Prints the
# driver's report.
nic_sends() {
    on two "nic $((REGISTERS * 4096)) $((base + $1)) $((base + $2))" | tr -d '\r' | grep .
}

agent_in_dom0
NIC=$(find_pci_device 0x8086 0x10d3)
check 'the hypervisor has an IOMMU' sh -c 'xl info | grep -E "virt_caps.*directio"' || give_up 'no IOMMU'
check 'the card is there' test -n "$NIC" || give_up 'no card'
enable_device $NIC
read -r bar rest <$NIC/resource
before=$(free_memory)
check 'a granter is created' create_window_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee with an IOMMU context and the registers is created' \
    create_window_guest_with_iommu two 'type="pvh"' "iomem=[\"$(printf %x $((bar >> 12))),20@${REGISTERS#0x}\"]" || give_up 'no grantee'
granter_id=$(domain_id one) grantee_id=$(domain_id two)
check 'the card is given to the grantee' assign_device $NIC $grantee_id || give_up 'no card to try'
matches 'a window is created' "$(granter create $grantee_id 64)" 'rc 0 status 0 handle 0'
grantee dev-open >/dev/null
matches 'it registers' "$(grantee dev-register $granter_id 0 64)" ok
base=$(on two cat /sys/module/ringfence_window/parameters/base | tr -d '\r' | grep .)
count_dma_faults >/dev/null

granter fill 0 what-the-card-sends >/dev/null
granter fill 1 empty >/dev/null
granter fill 2 read-only >/dev/null
granter fill 3 neighbour >/dev/null
matches 'the driver tries references that are not issued' "$(nic_sends 5 6)" 'status * sent *'
check 'the card faults' test $(count_dma_faults) -gt 0
is 'and changes nothing' "$(granter peek 1)" empty
matches 'two pages are issued' "$(granter issue 0 5 0 0 2)" '*ok 2*'
matches 'the card sends from one and receives into the other' "$(nic_sends 5 6)" 'status * sent 1 received 64'
is 'without a fault' "$(count_dma_faults)" 0
is 'what it received is what it sent' "$(granter peek 1)" what-the-card-sends
matches 'the page it receives into is revoked' "$(granter revoke 0 6 0)" '*ok 1*'
granter fill 1 after-the-revoke >/dev/null
matches 'the driver uses it on' "$(nic_sends 5 6)" 'status * sent *'
check 'the card faults' test $(count_dma_faults) -gt 0
is 'and changes nothing' "$(granter peek 1)" after-the-revoke
matches 'the page it sends from is revoked, and the other issued' "$(granter revoke 0 5 0) $(granter issue 0 6 1 0)" '*ok 1*ok 1*'
granter fill 0 SECRET >/dev/null
matches 'the driver uses it on' "$(nic_sends 5 6)" 'status * sent *'
check 'the card faults' test $(count_dma_faults) -gt 0
check 'and sends nothing of the page' sh -c "! echo '$(granter peek 1)' | grep SECRET"
matches 'pages are issued, one read-only' "$(granter issue 0 5 0 0) $(granter issue 0 7 2 1)" '*ok 1*ok 1*'
matches 'the driver receives into that' "$(nic_sends 5 7)" 'status * sent *'
check 'the card faults' test $(count_dma_faults) -gt 0
is 'and changes nothing' "$(granter peek 2) $(granter peek 3)" 'read-only neighbour'
for each in two one; do xl destroy $each; done
check 'the domains leave no zombie' wait_for 30 only_dom0_is_left
is 'no window is left' "$(dump_windows | grep -c ' window .* to d')" 0
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
