# title: the device of grant windows: both roles, pins, and processes that are killed
# set: name
# machine: xen-pvh
# limit: 900
# driver: window-tests

. /vm/xen/window.sh

# range: the first frame of the only window.
range() {
    dump_windows | sed -n 's/.*registered at gfn \(0x[0-9a-f]*\).*/\1/p'
}

# restart NAME: kills the agent as a crash would and starts another.
restart() {
    on $1 'kill -9 $(pidof agent); rm -f /run/agent.*; { agent serve >/tmp/agent.log 2>&1 & }; wait_for 20 test -p /run/agent.out'
}

before=$(free_memory)
check 'a granter is created' window_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee is created' window_guest two 'type="pvh"' || give_up 'without a grantee there is nothing to see'
A=$(domain one) B=$(domain two)
is 'the device is for root only' "$(on one stat -c %a-%u /dev/ringfence-window | tr -d '\r' | grep .)" 600-0
like 'the granter opens the device' "$(a dev-open)" ok
like 'a domain that is none is refused' "$(a dev-create 77 512)" 'No such device or address*'
like 'a window is created' "$(a dev-create $B 512)" 'ok handle 0'
like 'a file is one window' "$(a dev-create $B 512)" 'Device or resource busy*'
like 'the grantee opens the device' "$(b dev-open)" ok
like 'it registers' "$(b dev-register $A 0 512)" ok

a fill 0 by-the-device >/dev/null
like 'a page is issued' "$(a dev-issue 5 0 0)" 'ok 1 other 0'
is 'the grantee reads it' "$(b read 5)" by-the-device
like 'its kernel can pin it' "$(b pin 5)" 'write 4 by-t vmsplice 4096 by-t'
like 'a reference in use is not issued again' "$(a dev-issue 5 1 0)" 'ok 0 other -3'
b raise 5 1 >/dev/null
like 'a page in use is busy' "$(a dev-revoke 5 - 0)" 'ok 0 other -14'
is 'it is still there' "$(b read 5)" by-the-device
like 'force takes it' "$(a dev-revoke 5 - 1)" 'ok 1 other 0'
is 'it is gone' "$(b read 5)" gone
b raise 5 0 >/dev/null
like 'a batch is issued' "$(a dev-issue 0 100 0 512)" 'ok 512 other 0'
like 'the batch is revoked' "$(a dev-revoke 0 - 0 512)" 'ok 512 other 0'

# The granter's process is killed.
a dev-issue 0 100 0 100 >/dev/null
check 'the granter is killed' restart one
like 'its pages are gone' "$(b count 0 512)" 'gone 512 *'
is 'no window is left' "$(dump_windows | grep -c ' window .* to d')" 0

# A page that is pinned when its window is closed keeps the frames from the next window.
b dev-close >/dev/null
a dev-open >/dev/null
handle=$(a dev-create $B 512 | sed 's/.*handle //')
b dev-open >/dev/null
like 'a second window registers' "$(b dev-register $A $handle 512)" ok
first=$(range)
a dev-issue 3 3 0 >/dev/null
like 'its page is held by the kernel' "$(b hold 3)" 'held 4096'
b dev-close >/dev/null
like 'the granter learns that the window is gone' "$(a dev-revoke 3 - 0)" 'ok 0 other -4'
a dev-close >/dev/null
a dev-open >/dev/null
handle=$(a dev-create $B 512 | sed 's/.*handle //')
b dev-open >/dev/null
like 'a third window registers' "$(b dev-register $A $handle 512)" ok
second=$(range)
note "frames of the windows: $first, $second"
check 'its frames do not have the held one' test $((second)) -gt $((first + 3))

# The grantee's process is killed.
a dev-issue 0 100 0 100 >/dev/null
check 'the grantee is killed' restart two
is 'no window is left of it' "$(dump_windows | grep -c ' window .* to d')" 0
like 'the granter learns that' "$(a dev-revoke 0 - 0 100)" 'ok 0 other -4'
for each in one two; do xl destroy $each; done
check 'the guests leave no zombie' wait_for 30 sh -c '[ $(xl list | wc -l) = 2 ]'
is 'the memory is free again' "$(free_memory)" "$before"
complete
