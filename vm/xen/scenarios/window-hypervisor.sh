# title: grant windows in the hypervisor, between two PVH guests, and what must not work
# set: name
# machine: xen-pvh
# limit: 900
# grants: bad
# driver: window-tests
# hypervisor: debug

. /vm/xen/window.sh

before=$(free_memory)
check 'a granter is created' window_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee is created' window_guest two 'type="pvh"' || give_up 'without a grantee there is nothing to see'
A=$(domain one) B=$(domain two)
like 'the operations are there' "$(a query)" 'rc 0 version 1 *'

# A window by /dev/ringfence-window on the grantee's side, by raw operations on the granter's.
like 'a window of too many references is refused' "$(a create $B 4097)" '*status -13*'
like 'a window to nobody is refused' "$(a create 77 100)" '*status -2*'
like 'a PV domain cannot be a grantee' "$(a create 0 100)" '*status -2*'
like 'a window to oneself is refused' "$(a create $A 100)" '*status -2*'
like 'a window is created' "$(a create $B 1024)" 'rc 0 status 0 handle 0'
like 'nothing can be issued before it is registered' "$(a issue 0 5 0 0)" '*ok 0 other -12'
like 'another size does not register' "$(b register $A 0 1000 0x100000)" '*status -[45]'
like 'a handle that is none does not register' "$(b register $A 1 1024 0x100000)" '*status -4'
like 'memory of the grantee is no place for a window' "$(b register $A 0 1024 0x100)" '*status -5'
like 'frames beyond the address space are not' "$(b register $A 0 1024 0xffffffffff)" '*status -5'
like 'the device opens' "$(b dev-open)" ok
like 'it registers' "$(b dev-register $A 0 1024)" ok
like 'the pages cannot be mapped for running' "$(b dev-exec)" 'Invalid argument'
base=$(on two cat /sys/module/ringfence_window/parameters/base | tr -d '\r' | grep .)
like 'a window registers once' "$(b register $A 0 1024 $base)" '*status -[45]'
like 'what is not issued reads as ones' "$(b read 5)" gone

# Issue and revoke.
a fill 0 hello-from-the-granter >/dev/null
like 'a page is issued' "$(a issue 0 5 0 0)" '*ok 1*'
is 'the grantee reads it' "$(b read 5)" hello-from-the-granter
like 'its entry says so' "$(b slot 5)" 'entry 7 status 0'
b write 5 WRITTEN >/dev/null
like 'the grantee writes it' "$(a peek 0)" 'WRITTEN*'
like 'its kernel can pin it' "$(b pin 5)" 'write 4 WRIT vmsplice 4096 WRIT'
like 'a reference in use is not issued again' "$(a issue 0 5 1 0)" '*other -3'
like 'the page is revoked' "$(a revoke 0 5 0)" '*ok 1*'
is 'it is gone' "$(b read 5)" gone
b write 5 AFTER >/dev/null
like 'writes no longer reach it' "$(a peek 0)" 'WRITTEN*'
like 'what is not issued is not revoked' "$(a revoke 0 5 0)" '*other -3'
like 'references beyond the end are refused' "$(a issue 0 1024 0 0)" '*other -3'
like 'a frame without memory is refused' "$(a issue-gfn 0 1 0x10000000 0)" '*status -9'
like 'unknown flags are refused' "$(a issue-gfn 0 1 0x1000 2)" '*status -1'
like 'the grantee cannot issue' "$(b issue 0 1 0 0)" '*other -4'

# The status word, and a grantee that lies.
a issue 0 6 1 0 >/dev/null
b raise 6 1 >/dev/null
like 'a page in use is busy' "$(a revoke 0 6 0)" '*other -14'
like 'its entry is restored' "$(b slot 6)" 'entry b status 1'
like 'force takes it' "$(a revoke 0 6 1)" '*ok 1*'
is 'it is gone in spite of the status word' "$(b read 6)" gone
b raise 6 0 >/dev/null
a issue 0 7 1 0 >/dev/null
b forge 7 0 >/dev/null
like 'a forged entry has no effect on revoke' "$(a revoke 0 7 0)" '*ok 1*'
b forge 8 0xffffffff >/dev/null
is 'a forged entry gives no access' "$(b read 8)" gone

# Read-only pages, and pages that hold code.
a fill 2 read-only >/dev/null
a issue 0 8 2 1 >/dev/null
is 'a read-only page is read' "$(b read 8)" read-only
b write 8 CHANGED >/dev/null
is 'writes to it are discarded' "$(a peek 2)" read-only
a revoke 0 8 0 >/dev/null

# An ordinary grant operation aimed at the window's frame, pitfall 2: the grantee has mapped the same page by an ordinary
# grant, and ends that mapping with the address of the window's.
granted=$(a grant $B 3)
like 'a page is granted in the ordinary way, too' "$granted" 'ref [1-9]*'
a fill 3 BOTH-WAYS >/dev/null
a issue 0 9 3 0 >/dev/null
mapped=$(b map $A ${granted#ref } $((base + 20000)))
like 'the grantee maps it' "$mapped" 'rc 0 status 0 handle *'
like 'an ordinary unmap does not reach the window' "$(b unmap ${mapped##* } $((base + 9)))" '*status -*'
is 'the window has the page' "$(b read 9)" BOTH-WAYS
like 'the entry is still known' "$(a revoke 0 9 0)" '*ok 1*'
like 'the ordinary mapping ends by its own address' "$(b unmap ${mapped##* } $((base + 20000)))" '*status 0'

# A spinning reader never sees what the page holds after its revoke.
a fill 3 AAAAAAAA >/dev/null
a issue 0 20 3 0 >/dev/null
b spin 20 >/dev/null
wait_for 20 sh -c 'sleep 2'
like 'the reader runs' "$(b spun)" 'spins [1-9]* other 0'
a revoke 0 20 0 >/dev/null
a fill 3 SECRET >/dev/null
sleep 5
seen=$(b spun stop)
like 'the reader sees nothing new' "$seen" '* other 0'
note "canary: $seen"

# Pitfall 1: issues race the grantee's faults on holes.
b touch 512 >/dev/null
a churn 0 500 >/dev/null
sleep 20
like 'issues race faults' "$(a churned)" 'rounds [1-9]* revoked [1-9]* not 0 (0)'
like 'the grantee lives' "$(b touched)" 'touched [1-9]*'
note "$(a churned stop); $(b touched stop)"
sleep 1
like 'nothing is left of it' "$(b count 0 512)" 'gone 512 *'

# Batches: preemption, one flush for 64.
like 'a thousand are issued in one call' "$(a issue 0 0 100 0 1000)" 'rc 0 ok 1000*'
like 'the grantee has all of them' "$(b count 0 1024)" 'gone 24 zero *'
xl debug-keys P
like 'they are revoked in one call' "$(a revoke 0 0 0 1000)" 'rc 0 ok 1000*'
is 'with one flush for 64' "$(xl dmesg -c >/dev/null; xl debug-keys p; sleep 1; xl dmesg | sed -n 's/.*grant windows: TLB flushes.*TOTAL\[ *\([0-9]*\)\].*/\1/p')" 16

# Pages of the hypervisor: one whose frame is known, and all frames that are no memory of the granter's.
frame=$(a grant-frame)
like 'the hypervisor has a page among the granter'"'"'s frames' "$frame" 'rc 0 status 0 frame 0x[1-9a-f]*'
like 'it is not issued' "$(a issue-gfn 0 1 ${frame##* } 0)" 'rc 0 status -9'
like 'nor read-only' "$(a issue-gfn 0 2 ${frame##* } 1)" 'rc 0 status -9'
special=$(ON_LIMIT=120 a issue-special 0)
like 'no page of the hypervisor is issued' "$special" 'tried [1-9]* issued 0'
note "$special; $(on one grep -v '^ ' /proc/iomem | tr -d '\r' | tr '\n' ';')"

# A grantee that is stopped: revoke needs nothing of it.
a fill 30 stopped >/dev/null
a issue 0 30 30 0 >/dev/null
check 'the grantee is paused' xl pause two
like 'its page is revoked' "$(a revoke 0 30 0)" '*ok 1*'
check 'it goes on' xl unpause two
is 'the page is gone' "$(b read 30)" gone

# Live migration is refused with a reason, for both.
agent_in_dom0
xl dmesg -c >/dev/null
is 'log-dirty mode of the granter is refused' "$(agent log-dirty $A 2)" 'Device or resource busy'
is 'log-dirty mode of the grantee is refused' "$(agent log-dirty $B 2)" 'Device or resource busy'
is 'the hypervisor says why' "$(xl dmesg | grep -c 'has grant windows')" 2

# The grantee's end closes; the handle is not used again.
like 'the grantee closes its end' "$(b dev-close)" ok
like 'the handle is gone' "$(a issue 0 1 1 0)" '*other -4'
like 'a new window has another handle' "$(a create $B 512)" '*handle 32'
like 'the old handle does not reach it' "$(a issue 0 1 1 0)" '*other -4'
like 'the device opens again' "$(b dev-open)" ok
like 'it registers again' "$(b dev-register $A 32 512)" ok
like 'pages are issued' "$(a issue 32 0 0 0 512)" '*ok 512*'

# Deaths, with pages issued and while others are being issued.
a churn 32 500 >/dev/null
check 'the grantee is destroyed under load' xl destroy two
check 'it leaves no zombie' wait_for 20 is_not_there $B
like 'its window is gone' "$(a churned stop; a issue 32 0 0 0)" '*other -4'
check 'the granter is destroyed' xl destroy one
check 'it leaves no zombie, so no page of it is kept' wait_for 20 is_not_there $A
is 'the memory is free again' "$(free_memory)" "$before"
is 'no window is left' "$(dump_windows | grep -c ' window .* to d')" 0
complete
