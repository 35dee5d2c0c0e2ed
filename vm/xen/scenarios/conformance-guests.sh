# title: the platform conforms between two guests, neither of which has a role in the toolstack
# set: all
# machine: xen
# limit: 180
# grants: bad

. /vm/xen/conformance.sh

check 'two guests are created' a_pair || give_up 'without guests there is nothing to see'
check 'they take commands' guest_ready one two || give_up 'guests that do not answer show nothing'
A=$(domain one) B=$(domain two)
half one lender $B
half two user $A
check 'the second guest uses what the first lends' half_passed two
check 'the first guest says the same' half_passed one
half one user $B
half two lender $A
check 'the first guest uses what the second lends' half_passed one
check 'the second guest says the same' half_passed two
complete
