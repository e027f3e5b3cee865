// The field of the search. Enter opens the first result; the form would send itself instead, and load the page anew.
const searchField = document.getElementById("mkdocs-search-query");

searchField.form.addEventListener("submit", event => {
  event.preventDefault();
  const query = searchField.value.trim();
  if (!query) return;
  const open = ({data}) => {
    if (data.query !== query) return;      // of an earlier key
    searchWorker.removeEventListener("message", open);
    document.querySelector("#mkdocs-search-results a")?.click();
  };
  // The worker's own handler was there first: when this one is called, the results are drawn.
  searchWorker.addEventListener("message", open);
  searchWorker.postMessage({query});
});

// MkDocs listens to the keys once the index is there: what was typed before is asked now.
searchWorker.addEventListener("message", ({data}) => {
  if (data.allowSearch && searchField.value) doSearch();
});
