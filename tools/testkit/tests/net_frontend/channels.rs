//! Event channels used in every way but the right one.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_frame::testing::frame;
use ringfence_sys::descriptors::testing::send_raw;
use ringfence_testkit::net::process::{alone, descriptors, descriptors_settled};
use ringfence_testkit::net::{HostileFrontend, Neighbour, Stage};
use ringfence_wire::netif::Status;
use ringfence_wire::xenbus::XenbusState;
use rustix::net::{SendFlags, Shutdown, send};

struct Scene {
    stage: Stage,
    neighbour: Neighbour,
    guest: HostileFrontend,
    seed: u32,
}

impl Scene {
    fn new() -> Scene {
        let mut stage = Stage::new(Mode::Copy);
        let neighbour = Neighbour::join(&mut stage);
        let guest = HostileFrontend::connected(&mut stage);
        Scene { stage, neighbour, guest, seed: 0 }
    }

    /// One packet and one round; every response is to be announced.
    fn packet(&mut self) {
        self.seed += 1;
        let sent = frame(self.seed, 200);
        let slots = self.guest.packet(1, &sent, &[200]);
        self.guest.tx.page.store_u32(12, self.guest.tx.rsp_prod() + 1, Ordering::Release).unwrap();
        self.guest.post(&slots);
        self.stage.round();
    }

    fn packet_arrives(&mut self) {
        self.packet();
        assert_eq!(self.stage.arrived(self.guest.vif).len(), 1);
        assert_eq!(self.guest.statuses(), [Status::Okay]);
    }

    fn clear_events(&mut self) -> Result<(), ringfence_frame::Fault> {
        self.stage.vifs[self.guest.vif].host.port.as_mut().unwrap().clear_events()
    }

    /// The device ended, was counted under that rule, and starts over.
    fn ended(&mut self, rule: &str) {
        let vif = self.guest.vif;
        assert!(self.stage.vifs[vif].host.port.is_none(), "{rule}");
        assert_eq!(self.stage.rules(vif).get(rule), 1, "{:?}", self.stage.rules(vif).all());
        assert_eq!(self.stage.state(vif), XenbusState::Closing);
        self.neighbour.exchange(&mut self.stage);
        self.guest.connect(&mut self.stage, |_| {});
        self.packet_arrives();
    }
}

#[test]
fn xsa_332_a_channel_filled_to_the_brim_is_cleared_in_bounded_steps() {
    let mut scene = Scene::new();
    let sent = scene.guest.channels[0].fill();
    assert!(sent > 4096, "the guest filled its channel with {sent} bytes");
    scene.packet_arrives();
    scene.neighbour.exchange(&mut scene.stage);
    // Each look at it is one bounded read; it ends, since the guest sends no more.
    for _ in 0..=sent / 512 + 1 {
        scene.clear_events().unwrap();
    }
    scene.packet_arrives();
}

#[test]
fn a_guest_that_never_reads_its_channels_does_not_hold_up_notifications() {
    let mut scene = Scene::new();
    // Blocking or not is the affair of the guest's own end.
    for channel in &scene.guest.channels {
        rustix::io::ioctl_fionbio(&channel.socket, false).unwrap();
    }
    let begun = Instant::now();
    for _ in 0..3000 {
        scene.packet_arrives();
    }
    let taken = (0..).take_while(|_| scene.guest.channels[0].take()).count();
    assert!(taken > 0, "it was notified");
    assert!(begun.elapsed() < Duration::from_secs(60));
    scene.neighbour.exchange(&mut scene.stage);
}

#[test]
fn a_closed_channel_costs_the_device() {
    let mut scene = Scene::new();
    scene.guest.channels.clear();
    scene.packet();
    scene.ended("channel_closed");
}

#[test]
fn a_closed_rx_channel_costs_the_device() {
    let mut scene = Scene::new();
    scene.guest.channels.truncate(1);
    scene.guest.rx.page.store_u32(12, 1, Ordering::Release).unwrap();
    scene.guest.post_buffers([16]);
    assert_eq!(scene.stage.send(scene.guest.vif, &[frame(1, 60)]), None);
    scene.ended("channel_closed");
}

#[test]
fn a_channel_shut_down_in_one_direction_costs_the_device() {
    // Nothing can be sent to it any more: shows with the next notification.
    let mut scene = Scene::new();
    scene.guest.channels[0].shut(Shutdown::Read);
    scene.packet();
    scene.ended("channel_closed");
    // Nothing will come from it any more: shows when its event is looked at.
    let mut scene = Scene::new();
    scene.guest.channels[0].shut(Shutdown::Write);
    scene.clear_events().unwrap();
    assert!(scene.clear_events().is_err(), "what was sent before came first");
    assert_eq!(scene.stage.rules(scene.guest.vif).get("channel_closed"), 1);
    scene.neighbour.exchange(&mut scene.stage);
}

#[test]
fn descriptors_sent_over_a_channel_are_not_kept() {
    alone("channels::descriptors_sent_over_a_channel_are_not_kept", surplus_descriptors);
}

fn surplus_descriptors() {
    let mut scene = Scene::new();
    let spare = rustix::fs::memfd_create("spare", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let before = descriptors();
    for _ in 0..50 {
        let mut went = 0;
        let mut refused = None;
        while went < 20 && refused.is_none() {
            match send_raw(&scene.guest.channels[0].socket, &[1], &[spare.as_fd(); 40]) {
                Ok(()) => went += 1,
                Err(error) => refused = error.raw_os_error(),
            }
        }
        // From Linux 6.16 on the socket refuses them, so that none is sent at all.
        assert!(
            went > 0 || refused == Some(libc::EPERM),
            "the guest sends descriptors: {refused:?}"
        );
        for _ in 0..went {
            scene.clear_events().unwrap();
        }
        scene.packet_arrives();
    }
    scene.neighbour.exchange(&mut scene.stage);
    assert!(descriptors_settled(before) <= before, "some were kept");
}

#[test]
fn out_of_band_bytes_mean_nothing() {
    let mut scene = Scene::new();
    for _ in 0..100 {
        // Kernels without out-of-band data for such sockets refuse it, which is as well.
        let _ = send(&scene.guest.channels[0].socket, &[1], SendFlags::OOB | SendFlags::DONTWAIT);
        scene.clear_events().unwrap();
        scene.packet_arrives();
    }
    scene.neighbour.exchange(&mut scene.stage);
}

/// A thread that notifies as fast as it can, from both channels, while the backend's thread serves
/// the neighbour and looks at every event.
#[test]
fn xsa_331_an_event_storm_does_not_stop_the_neighbour() {
    let mut scene = Scene::new();
    let stop = Arc::new(AtomicBool::new(false));
    let (seen, channels) = (Arc::clone(&stop), core::mem::take(&mut scene.guest.channels));
    let storm = std::thread::spawn(move || {
        let mut sent = 0u64;
        while !seen.load(Ordering::Relaxed) {
            channels.iter().for_each(|channel| channel.notify());
            sent += 2;
        }
        (sent, channels)
    });
    let begun = Instant::now();
    let mut exchanges = 0u32;
    while begun.elapsed() < Duration::from_millis(300) || exchanges < 50 {
        scene.clear_events().unwrap();
        scene.neighbour.exchange(&mut scene.stage);
        exchanges += 1;
        assert!(begun.elapsed() < Duration::from_secs(60), "{exchanges} exchanges beside a storm");
    }
    stop.store(true, Ordering::Relaxed);
    let (sent, channels) = storm.join().unwrap();
    assert!(sent > 1000, "{sent} notifications are no storm");
    scene.guest.channels = channels;
    scene.packet_arrives();
}
