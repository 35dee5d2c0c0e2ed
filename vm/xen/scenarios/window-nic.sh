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

# sends FROM TO: what the driver says of a frame.
sends() {
    on two "nic $((REGISTERS * 4096)) $((base + $1)) $((base + $2))" | tr -d '\r' | grep .
}

agent_in_dom0
NIC=$(device_of 0x8086 0x10d3)
check 'the hypervisor has an IOMMU' sh -c 'xl info | grep -E "virt_caps.*directio"' || give_up 'no IOMMU'
check 'the card is there' test -n "$NIC" || give_up 'no card'
enable_device $NIC
read -r bar rest <$NIC/resource
before=$(free_memory)
check 'a granter is created' window_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee with an IOMMU context and the registers is created' \
    with_iommu two 'type="pvh"' "iomem=[\"$(printf %x $((bar >> 12))),20@${REGISTERS#0x}\"]" || give_up 'no grantee'
A=$(domain one) B=$(domain two)
check 'the card is given to the grantee' assigned $NIC || give_up 'no card to try'
like 'a window is created' "$(a create $B 64)" 'rc 0 status 0 handle 0'
b dev-open >/dev/null
like 'it registers' "$(b dev-register $A 0 64)" ok
base=$(on two cat /sys/module/ringfence_window/parameters/base | tr -d '\r' | grep .)
faults >/dev/null

a fill 0 what-the-card-sends >/dev/null
a fill 1 empty >/dev/null
a fill 2 read-only >/dev/null
a fill 3 neighbour >/dev/null
like 'the driver tries references that are not issued' "$(sends 5 6)" 'status * sent *'
check 'the card faults' test $(faults) -gt 0
is 'and changes nothing' "$(a peek 1)" empty
like 'two pages are issued' "$(a issue 0 5 0 0 2)" '*ok 2*'
like 'the card sends from one and receives into the other' "$(sends 5 6)" 'status * sent 1 received 64'
is 'without a fault' "$(faults)" 0
is 'what it received is what it sent' "$(a peek 1)" what-the-card-sends
like 'the page it receives into is revoked' "$(a revoke 0 6 0)" '*ok 1*'
a fill 1 after-the-revoke >/dev/null
like 'the driver uses it on' "$(sends 5 6)" 'status * sent *'
check 'the card faults' test $(faults) -gt 0
is 'and changes nothing' "$(a peek 1)" after-the-revoke
like 'the page it sends from is revoked, and the other issued' "$(a revoke 0 5 0) $(a issue 0 6 1 0)" '*ok 1*ok 1*'
a fill 0 SECRET >/dev/null
like 'the driver uses it on' "$(sends 5 6)" 'status * sent *'
check 'the card faults' test $(faults) -gt 0
check 'and sends nothing of the page' sh -c "! echo '$(a peek 1)' | grep SECRET"
like 'pages are issued, one read-only' "$(a issue 0 5 0 0) $(a issue 0 7 2 1)" '*ok 1*ok 1*'
like 'the driver receives into that' "$(sends 5 7)" 'status * sent *'
check 'the card faults' test $(faults) -gt 0
is 'and changes nothing' "$(a peek 2) $(a peek 3)" 'read-only neighbour'
for each in two one; do xl destroy $each; done
check 'the domains leave no zombie' wait_for 30 alone
is 'no window is left' "$(dump_windows | grep -c ' window .* to d')" 0
is 'the memory is free again' "$(free_memory)" "$before"
complete
