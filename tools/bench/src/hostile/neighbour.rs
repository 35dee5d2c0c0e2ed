//! Adversary guest of the packet rows: attaches as its own launcher and attacks until it is ended.

use std::os::fd::OwnedFd;

use ringfence_platform::Platform;
use ringfence_platform::local::LocalPlatform;
use ringfence_sandbox::channel::Channel;
use ringfence_testkit::hostile::adversary::VifAdversary;
use ringfence_testkit::hostile::attacks::{self, AttackState};
use ringfence_testkit::hostile::behaviour::Behaviour;
use ringfence_testkit::hostile::control::WrongAnswer;
use ringfence_testkit::hostile::handshake::{Pace, STEP_WITHIN};
use ringfence_wire::xenbus::XenbusState;

use super::launcher::Attachment;
use super::orders::{Entrance, HostileAnswer};

/// Adversary that is registered with the driver domain's hub.
struct Joined {
    /// Hub session of its launcher. Declared before the adversary, so dropped first.
    _attachment: Attachment,
    adversary: VifAdversary<LocalPlatform>,
}

impl Joined {
    fn join(entrance: &Entrance) -> anyhow::Result<Joined> {
        let attachment = Attachment::take(entrance)?;
        let hub: OwnedFd = attachment.hub.try_clone()?;
        let platform = LocalPlatform::connect(attachment.hub.try_clone()?)?;
        let pace = Pace { step_within: STEP_WITHIN, pause: std::thread::yield_now };
        let (device, mac) = (attachment.place.device(), attachment.place.mac);
        let open_store = LocalPlatform::store_connection;
        let adversary = VifAdversary::new(platform, device, mac, open_store, pace)?;
        Ok(Joined { _attachment: attachment, adversary: adversary.with_hub(hub) })
    }
}

/// Attacks until the parent ends this process.
pub(super) fn serve(
    channel: &Channel,
    entrance: &Entrance,
    behaviour: Behaviour,
) -> anyhow::Result<()> {
    let mut said = false;
    loop {
        let mut joined = Joined::join(entrance)?;
        let ended = live(&mut joined.adversary, behaviour, &mut || {
            if !core::mem::replace(&mut said, true) {
                channel.send(&HostileAnswer::Ready, &[])?;
            }
            Ok(())
        });
        // The driver domain ends connections in reaction, so reconnect. Only a wrong response is a failure.
        if let Err(why) = ended
            && why.is::<WrongAnswer>()
        {
            return Err(why);
        }
        std::thread::yield_now();
    }
}

/// Attacks from the first handshake to the end of the connection to the hub or the store.
fn live<P: Platform>(
    adversary: &mut VifAdversary<P>,
    behaviour: Behaviour,
    began: &mut dyn FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut state = AttackState::default();
    loop {
        // The driver domain may refuse the device for a while only.
        if adversary.connect().is_err() {
            std::thread::yield_now();
            adversary.handshake.enter(XenbusState::Closed)?;
            continue;
        }
        adversary.address_all()?;
        loop {
            attacks::burst(adversary, behaviour, &mut state)?;
            began()?;
            std::thread::yield_now();
            let stays = match behaviour {
                Behaviour::Reattach => false,
                // The guest itself writes the states, so a closed device is no reaction.
                Behaviour::StateFlood => true,
                _ => !adversary.handshake.was_closed()?,
            };
            if !stays {
                break;
            }
        }
    }
}
