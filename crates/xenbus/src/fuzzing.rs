//! The body of the fuzz target about the handshake. It also runs as a property test.

use ringfence_wire::xenbus::XenbusState;

use crate::steps::World;

/// Plays both sides of a vif. The first octet says who is hostile (bit 0 the frontend, bit 1 the
/// backend) and whether the frontend waits for the backend to be Connected (bit 2), each pair of octets behind it is an action: what is done, and a state.
///
/// # Panics
///
/// When a side does not come to rest by itself, holds what it must not, or cannot be connected with
/// by a peer that starts over.
pub fn vif_states(data: &[u8]) {
    let Some((&who, actions)) = data.split_first() else { return };
    let (front_is_hostile, back_is_hostile) = (who & 1 != 0, who & 2 != 0);
    let mut world = World { front_waits: who & 4 != 0, ..World::fresh() };
    for action in actions.as_chunks::<2>().0.iter().take(500) {
        let [what, state] = *action;
        let state = XenbusState::from_raw(u32::from(state % 12));
        world = match what % 12 {
            0 if !back_is_hostile => world.back_moves(),
            1 if !front_is_hostile => world.front_moves(),
            2 if !back_is_hostile => world.back_rests(),
            3 if !front_is_hostile => world.front_rests(),
            4 | 5 if front_is_hostile => {
                world.front.own = state;
                world.keys.front = true;
                world
            }
            6 if front_is_hostile => {
                world.keys.front = false;
                world
            }
            4..=6 if back_is_hostile => {
                world.back.own = state;
                world.keys.back = what % 12 != 6;
                world
            }
            // The data path ends on one side, for whatever reason.
            7 => {
                world.back.penalized |= world.back.attached;
                world
            }
            8 => {
                world.front.broken |= world.front.attached;
                world
            }
            // The toolstack takes the device away, or thinks better of it.
            9 => {
                world.back.online = state != XenbusState::Closed;
                world
            }
            10 if !front_is_hostile => world.with_new_frontend(),
            11 if !back_is_hostile => world.with_new_backend(),
            _ => world,
        };
        world = world.looked();
    }
    if !back_is_hostile {
        world = world.back_rests();
    }
    if !front_is_hostile {
        world = world.front_rests();
    }
    // Whoever was hostile is replaced by somebody who is not; both sides' owners want the device.
    world.back.online = true;
    if back_is_hostile || !world.keys.front {
        world = world.with_new_backend();
    }
    let world = world.with_new_frontend().settle();
    assert!(world.is_up(), "no connection to a peer that starts over: {world:?}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn xsa_350_any_sequence_of_states_is_survived(
            who in 0u8..8,
            actions in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let data: Vec<u8> = std::iter::once(who).chain(actions).collect();
            vif_states(&data);
        }
    }
}
