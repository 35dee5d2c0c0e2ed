# title: grant windows in the hypervisor, between two PVH guests, and what must not work
# set: name
# machine: xen-pvh
# limit: 900
# grants: bad
# driver: window-tests
# hypervisor: debug

. /vm/xen/window.sh

before=$(free_memory)
check 'a granter is created' create_window_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee is created' create_window_guest two 'type="pvh"' || give_up 'without a grantee there is nothing to see'
granter_id=$(domain_id one) grantee_id=$(domain_id two)
matches 'the operations are there' "$(granter query)" 'rc 0 version 1 *'

# A window by /dev/ringfence-window on the grantee's side, by raw operations on the granter's.
matches 'a window of too many references is refused' "$(granter create $grantee_id 4097)" '*status -13*'
matches 'a window to nobody is refused' "$(granter create 77 100)" '*status -2*'
matches 'a PV domain cannot be a grantee' "$(granter create 0 100)" '*status -2*'
matches 'a window to oneself is refused' "$(granter create $granter_id 100)" '*status -2*'
matches 'a window is created' "$(granter create $grantee_id 1024)" 'rc 0 status 0 handle 0'
matches 'nothing can be issued before it is registered' "$(granter issue 0 5 0 0)" '*ok 0 other -12'
matches 'another size does not register' "$(grantee register $granter_id 0 1000 0x100000)" '*status -[45]'
matches 'a handle that is none does not register' "$(grantee register $granter_id 1 1024 0x100000)" '*status -4'
matches 'memory of the grantee is no place for a window' "$(grantee register $granter_id 0 1024 0x100)" '*status -5'
matches 'frames beyond the address space are not' "$(grantee register $granter_id 0 1024 0xffffffffff)" '*status -5'
matches 'the device opens' "$(grantee dev-open)" ok
matches 'it registers' "$(grantee dev-register $granter_id 0 1024)" ok
matches 'the pages cannot be mapped for running' "$(grantee dev-exec)" 'Invalid argument'
base=$(on two cat /sys/module/ringfence_window/parameters/base | tr -d '\r' | grep .)
matches 'a window registers once' "$(grantee register $granter_id 0 1024 $base)" '*status -[45]'
matches 'what is not issued reads as ones' "$(grantee read 5)" gone

# Issue and revoke.
granter fill 0 hello-from-the-granter >/dev/null
matches 'a page is issued' "$(granter issue 0 5 0 0)" '*ok 1*'
is 'the grantee reads it' "$(grantee read 5)" hello-from-the-granter
matches 'its entry says so' "$(grantee slot 5)" 'entry 7 status 0'
grantee write 5 WRITTEN >/dev/null
matches 'the grantee writes it' "$(granter peek 0)" 'WRITTEN*'
matches 'its kernel can pin it' "$(grantee pin 5)" 'write 4 WRIT vmsplice 4096 WRIT'
matches 'a reference in use is not issued again' "$(granter issue 0 5 1 0)" '*other -3'
matches 'the page is revoked' "$(granter revoke 0 5 0)" '*ok 1*'
is 'it is gone' "$(grantee read 5)" gone
grantee write 5 AFTER >/dev/null
matches 'writes no longer reach it' "$(granter peek 0)" 'WRITTEN*'
matches 'what is not issued is not revoked' "$(granter revoke 0 5 0)" '*other -3'
matches 'references beyond the end are refused' "$(granter issue 0 1024 0 0)" '*other -3'
matches 'a frame without memory is refused' "$(granter issue-gfn 0 1 0x10000000 0)" '*status -9'
matches 'unknown flags are refused' "$(granter issue-gfn 0 1 0x1000 2)" '*status -1'
matches 'the grantee cannot issue' "$(grantee issue 0 1 0 0)" '*other -4'

# The status word, and a grantee that lies.
granter issue 0 6 1 0 >/dev/null
grantee raise 6 1 >/dev/null
matches 'a page in use is busy' "$(granter revoke 0 6 0)" '*other -14'
matches 'its entry is restored' "$(grantee slot 6)" 'entry b status 1'
matches 'force takes it' "$(granter revoke 0 6 1)" '*ok 1*'
is 'it is gone in spite of the status word' "$(grantee read 6)" gone
grantee raise 6 0 >/dev/null
granter issue 0 7 1 0 >/dev/null
grantee forge 7 0 >/dev/null
matches 'a forged entry has no effect on revoke' "$(granter revoke 0 7 0)" '*ok 1*'
grantee forge 8 0xffffffff >/dev/null
is 'a forged entry gives no access' "$(grantee read 8)" gone

# Read-only pages, and pages that hold code.
granter fill 2 read-only >/dev/null
granter issue 0 8 2 1 >/dev/null
is 'a read-only page is read' "$(grantee read 8)" read-only
grantee write 8 CHANGED >/dev/null
is 'writes to it are discarded' "$(granter peek 2)" read-only
granter revoke 0 8 0 >/dev/null

# An ordinary grant operation aimed at the window's frame, pitfall 2: the grantee has mapped the same page by an ordinary
# grant, and ends that mapping with the address of the window's.
granted=$(granter grant $grantee_id 3)
matches 'a page is granted in the ordinary way, too' "$granted" 'ref [1-9]*'
granter fill 3 BOTH-WAYS >/dev/null
granter issue 0 9 3 0 >/dev/null
mapped=$(grantee map $granter_id ${granted#ref } $((base + 20000)))
matches 'the grantee maps it' "$mapped" 'rc 0 status 0 handle *'
matches 'an ordinary unmap does not reach the window' "$(grantee unmap ${mapped##* } $((base + 9)))" '*status -*'
is 'the window has the page' "$(grantee read 9)" BOTH-WAYS
matches 'the entry is still known' "$(granter revoke 0 9 0)" '*ok 1*'
matches 'the ordinary mapping ends by its own address' "$(grantee unmap ${mapped##* } $((base + 20000)))" '*status 0'

# A spinning reader never sees what the page holds after its revoke.
granter fill 3 AAAAAAAA >/dev/null
granter issue 0 20 3 0 >/dev/null
grantee spin 20 >/dev/null
wait_for 20 sh -c 'sleep 2'
matches 'the reader runs' "$(grantee spun)" 'spins [1-9]* other 0'
granter revoke 0 20 0 >/dev/null
granter fill 3 SECRET >/dev/null
sleep 5
seen=$(grantee spun stop)
matches 'the reader sees nothing new' "$seen" '* other 0'
note "canary: $seen"

# Pitfall 1: issues race the grantee's faults on holes.
grantee touch 512 >/dev/null
granter churn 0 500 >/dev/null
sleep 20
matches 'issues race faults' "$(granter churned)" 'rounds [1-9]* revoked [1-9]* not 0 (0)'
matches 'the grantee lives' "$(grantee touched)" 'touched [1-9]*'
note "$(granter churned stop); $(grantee touched stop)"
sleep 1
matches 'nothing is left of it' "$(grantee count 0 512)" 'gone 512 *'

# Batches: preemption, one flush for 64.
matches 'a thousand are issued in one call' "$(granter issue 0 0 100 0 1000)" 'rc 0 ok 1000*'
matches 'the grantee has all of them' "$(grantee count 0 1024)" 'gone 24 zero *'
xl debug-keys P
matches 'they are revoked in one call' "$(granter revoke 0 0 0 1000)" 'rc 0 ok 1000*'
is 'with one flush for 64' "$(xl dmesg -c >/dev/null; xl debug-keys p; sleep 1; xl dmesg | sed -n 's/.*grant windows: TLB flushes.*TOTAL\[ *\([0-9]*\)\].*/\1/p')" 16

# Pages of the hypervisor: one whose frame is known, and all frames that are no memory of the granter's.
frame=$(granter grant-frame)
matches 'the hypervisor has a page among the granter'"'"'s frames' "$frame" 'rc 0 status 0 frame 0x[1-9a-f]*'
matches 'it is not issued' "$(granter issue-gfn 0 1 ${frame##* } 0)" 'rc 0 status -9'
matches 'nor read-only' "$(granter issue-gfn 0 2 ${frame##* } 1)" 'rc 0 status -9'
special=$(ON_LIMIT=120 granter issue-special 0)
matches 'no page of the hypervisor is issued' "$special" 'tried [1-9]* issued 0'
note "$special; $(on one grep -v '^ ' /proc/iomem | tr -d '\r' | tr '\n' ';')"

# A grantee that is stopped: revoke needs nothing of it.
granter fill 30 stopped >/dev/null
granter issue 0 30 30 0 >/dev/null
check 'the grantee is paused' xl pause two
matches 'its page is revoked' "$(granter revoke 0 30 0)" '*ok 1*'
check 'it goes on' xl unpause two
is 'the page is gone' "$(grantee read 30)" gone

# Live migration is refused with a reason, for both.
agent_in_dom0
xl dmesg -c >/dev/null
is 'log-dirty mode of the granter is refused' "$(agent log-dirty $granter_id 2)" 'Device or resource busy'
is 'log-dirty mode of the grantee is refused' "$(agent log-dirty $grantee_id 2)" 'Device or resource busy'
is 'the hypervisor says why' "$(xl dmesg | grep -c 'has grant windows')" 2

# The grantee's end closes; the handle is not used again.
matches 'the grantee closes its end' "$(grantee dev-close)" ok
matches 'the handle is gone' "$(granter issue 0 1 1 0)" '*other -4'
matches 'a new window has another handle' "$(granter create $grantee_id 512)" '*handle 32'
matches 'the old handle does not reach it' "$(granter issue 0 1 1 0)" '*other -4'
matches 'the device opens again' "$(grantee dev-open)" ok
matches 'it registers again' "$(grantee dev-register $granter_id 32 512)" ok
matches 'pages are issued' "$(granter issue 32 0 0 0 512)" '*ok 512*'

# Deaths, with pages issued and while others are being issued.
granter churn 32 500 >/dev/null
check 'the grantee is destroyed under load' xl destroy two
check 'it leaves no zombie' wait_for 20 domain_is_gone $grantee_id
matches 'its window is gone' "$(granter churned stop; granter issue 32 0 0 0)" '*other -4'
check 'the granter is destroyed' xl destroy one
check 'it leaves no zombie, so no page of it is kept' wait_for 20 domain_is_gone $granter_id
is 'the memory is free again' "$(free_memory)" "$before"
is 'no window is left' "$(dump_windows | grep -c ' window .* to d')" 0
complete_scenario
