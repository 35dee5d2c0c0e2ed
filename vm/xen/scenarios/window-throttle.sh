# title: a granter's flushes are bounded, and teardown is not
# set: name
# machine: xen-pvh
# limit: 300
# options: gnttab_window_flush_rate=2
# driver: window-tests
# hypervisor: debug

. /vm/xen/window.sh

before=$(free_memory)
check 'a granter is created' window_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee is created' window_guest two 'type="pvh"' || give_up 'without a grantee there is nothing to see'
A=$(domain one) B=$(domain two)
like 'a window is created' "$(a create $B 1024)" 'rc 0 status 0 handle 0'
b dev-open >/dev/null
like 'it registers' "$(b dev-register $A 0 1024)" ok
like 'a thousand pages are issued' "$(a issue 0 0 100 0 1000)" 'rc 0 ok 1000*'
sleep 2
# Two flushes of 64 pages each are there, and a third may be earned meanwhile.
like 'few of them are revoked in one call, and the rest is to be tried again' "$(a revoke 0 0 0 1000)" 'rc 0 ok 1[29][28] other -12'
like 'nor has force another budget' "$(a revoke 0 300 1 700)" 'rc 0 ok * other -12'
left=$(b count 0 1024)
like 'the grantee has the others' "$left" 'gone * zero [1-9]*'
note "$left"
like 'the hypervisor counts the refusals' "$(dump_windows | grep 'throttled')" '* [1-9]* throttled'
sleep 2
like 'later more are revoked' "$(a revoke 0 500 0 64)" 'rc 0 ok 64*'
check 'the grantee is destroyed' xl destroy two
check 'it leaves no zombie: teardown has no budget' wait_for 20 is_not_there $B
check 'the granter is destroyed' xl destroy one
check 'it leaves no zombie' wait_for 20 is_not_there $A
is 'the memory is free again' "$(free_memory)" "$before"
complete
