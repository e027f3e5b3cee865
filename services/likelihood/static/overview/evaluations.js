// The list of a run's evaluations comes as it is; its theme is that of the other pages.
window.Unspiral.theme.start(() => {});
